"""Which block lies where: the placements on each segment, and the accounts of every byte."""

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.segments import Segment, Totals
from kvpool.core.directory.surplus import SurplusList, link, unlink
from kvpool.core.directory.table import NIL, BlockTable, PlacementTable, Reuse, Rows, view
from kvpool.core.directory.tenants import Tenants


class Placements:
    """Which block lies where: keeps the two lists every placement is on, and the segments' accounts.

    Of the copies of one shard of a block the *last* in the block's list is the primary one, and the others, the newest
    first, are surplus: they go first when room is needed. A segment keeps them on a list of their own, over the same
    columns, so that a further copy costs its row and nothing else. Every byte is accounted here and nowhere else, so
    `used_bytes` is the sum of the slots by construction.
    """

    def __init__(self, blocks: BlockTable, tenants: Tenants) -> None:
        self.rows = PlacementTable()
        self.segments: dict[int, Segment] = {}
        self.memory = Totals()
        self.disk = Totals()
        self._blocks = blocks
        self._tenants = tenants

    def add_segment(self, segment: Segment) -> None:
        """Open an empty segment."""
        self.segments[segment.number] = segment
        segment.totals = self.disk if segment.is_disk else self.memory
        segment.of_tenants = self._tenants.disk if segment.is_disk else self._tenants.memory
        segment.totals.capacity_bytes += segment.capacity_bytes

    def remove_segment(self, segment: Segment) -> None:
        """Close a segment whose placements are all gone, and the promises with them."""
        assert segment.first == NIL
        assert not segment.surplus
        assert segment.used_bytes == 0
        del self.segments[segment.number]
        segment.totals.capacity_bytes -= segment.capacity_bytes

    def add(self, block: int, shard: int, segment: Segment, slot_bytes: int) -> int:
        """Reserve ``slot_bytes`` on ``segment`` for one shard of ``block``; a further copy of it is surplus."""
        rows, head = self.rows, self._blocks.placement[block]
        is_surplus = head != NIL and self.primary(block, shard) != NIL
        placement = rows.add(block, shard, segment.number)
        if head == NIL:
            self._blocks.home_segment[block] = segment.number
        rows.next[placement] = head
        self._blocks.placement[block] = placement
        self._push(placement, segment, slot_bytes, is_surplus=is_surplus)
        segment.blocks += 1
        self._use(segment, self._blocks.namespace[block], slot_bytes)
        return placement

    def add_run(self, blocks: Rows, shard: int, segment: Segment, slot_bytes: int) -> None:
        """`add` for several blocks."""
        rows = self.rows
        if not isinstance(blocks, range) or self._blocks.placement[blocks[0]] != NIL:
            for block in blocks:
                self.add(block, shard, segment, slot_bytes)
            return
        placements = rows.add_run(blocks, shard, segment.number)
        count = len(placements)
        self._blocks.home_segment[blocks.start : blocks.stop] = array("H", [segment.number]) * count
        self._blocks.placement[blocks.start : blocks.stop] = array("i", placements)
        following = segment.first
        for placement in placements:
            rows.segment_next[placement] = following
            if following != NIL:
                rows.segment_previous[following] = placement
            following = placement
        rows.segment_previous[following] = NIL
        segment.first = following
        segment.blocks += count
        self._use(segment, self._blocks.namespace[blocks[0]], count * slot_bytes)

    def add_committed(
        self,
        blocks: NDArray[np.int32],
        segment: Segment,
        slot_bytes: int,
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint64],
        checksums: NDArray[np.uint64],
    ) -> None:
        """`add` for new blocks of one shard that are written already."""
        count, rows = len(blocks), self.rows
        placements = np.array(rows.add_run(blocks.tolist(), 0, segment.number), np.int32)
        view(rows.slot)[placements] = slots
        view(rows.generation)[placements] = generations
        view(rows.checksum)[placements] = checksums
        view(self._blocks.home_segment)[blocks] = segment.number
        view(self._blocks.placement)[blocks] = placements
        view(rows.segment_next)[placements[1:]] = placements[:-1]
        view(rows.segment_previous)[placements[:-1]] = placements[1:]
        rows.segment_next[placements[0]] = segment.first
        rows.segment_previous[placements[-1]] = NIL
        if segment.first != NIL:
            rows.segment_previous[segment.first] = int(placements[0])
        segment.first = int(placements[-1])
        segment.blocks += count
        self._use(segment, self._blocks.namespace[blocks[0]], count * slot_bytes)

    def remove(self, placement: int, slot_bytes: int) -> None:
        """Take the placement off its block and its segment and give its bytes back.

        When it was the primary copy of its shard, the oldest surplus one takes over.
        """
        rows, block = self.rows, self.rows.block[placement]
        segment = self.segments[rows.segment[placement]]
        if self._blocks.placement[block] == placement and rows.next[placement] == NIL:  # nearly always
            self._blocks.placement[block] = NIL
            self._pull(placement, segment, slot_bytes, is_surplus=False)
        else:
            self._remove_one_of_several(placement, segment, slot_bytes)
        segment.blocks -= 1
        self._use(segment, self._blocks.namespace[block], -slot_bytes)
        if segment.totals is self.disk:
            self._blocks.reused[block] = Reuse.NONE
        rows.free(placement)

    def make_primary(self, placement: int, slot_bytes: int) -> None:
        """Let a surplus copy change places with the primary one of its shard."""
        rows, block = self.rows, self.rows.block[placement]
        former = self.primary(block, rows.shard[placement])
        if former == placement:
            return
        self._unlink_from_block(placement)
        rows.next[self._last(block)] = placement
        rows.next[placement] = NIL
        former_segment = self.segments[rows.segment[former]]
        self._pull(former, former_segment, slot_bytes, is_surplus=False)
        self._push(former, former_segment, slot_bytes, is_surplus=True)
        self._promote(placement, slot_bytes)
        self._settle_home(block)

    def freshen(self, placement: int, slot_bytes: int) -> None:
        """A surplus copy was read: it goes after those of its segment that were not."""
        segment = self.segments[self.rows.segment[placement]]
        if segment.surplus[self._blocks.owner(self.rows.block[placement])].first != placement:
            self._pull(placement, segment, slot_bytes, is_surplus=True)
            self._push(placement, segment, slot_bytes, is_surplus=True)

    def is_on_disk(self, block: int) -> bool:
        """Whether the oldest primary copy of ``block`` lies on disk: what is in memory of it is surplus."""
        home = self.segments.get(self._blocks.home_segment[block])
        return home is not None and home.is_disk and self._blocks.placement[block] != NIL

    def is_due(self, surplus: int, last_use_us: int) -> bool:
        """Whether a surplus copy should go before a block last used then: what is on disk too goes by its age."""
        block = self.rows.block[surplus]
        return not self.is_on_disk(block) or self._blocks.last_use_us[block] <= last_use_us

    def memory_of(self, node_id: str) -> Segment | None:
        """The open segment of a node that new blocks are written to."""
        own = (s for s in self.segments.values() if s.open and s.node_id == node_id and not s.is_disk)
        return next(own, None)

    def promise(self, segment: Segment, namespace: int, size_bytes: int) -> None:
        """Account for bytes that blocks of ``namespace`` will use on ``segment``."""
        self._use(segment, namespace, size_bytes)

    def withdraw(self, segment: Segment, namespace: int, size_bytes: int) -> None:
        """Undo `promise`."""
        self._use(segment, namespace, -size_bytes)

    def primary(self, block: int, shard: int) -> int:
        """The primary copy of ``shard`` of ``block``, or NIL."""
        found = NIL
        for placement in self.of_block(block):
            if self.rows.shard[placement] == shard:
                found = placement
        return found

    def is_surplus(self, placement: int) -> bool:
        """Whether its block has an older copy of its shard."""
        rows, shard = self.rows, self.rows.shard[placement]
        following = rows.next[placement]
        while following != NIL and rows.shard[following] != shard:
            following = rows.next[following]
        return following != NIL

    def of_block(self, block: int) -> Iterator[int]:
        """Placement rows of ``block``; safe against removal of the row just given."""
        placement = self._blocks.placement[block]
        while placement != NIL:
            following = self.rows.next[placement]
            yield placement
            placement = following

    def of_segment(self, segment: Segment) -> Iterator[int]:
        """Placement rows of ``segment``; safe against removal of the row just given."""
        for first in (segment.first, *(copies.first for copies in segment.surplus.values())):
            placement = first
            while placement != NIL:
                following = self.rows.segment_next[placement]
                yield placement
                placement = following

    def find(self, block: int, shard: int, segment: int) -> int:
        """The placement of ``shard`` of ``block`` on ``segment``, or NIL."""
        rows = self.rows
        placement = self._blocks.placement[block]
        while placement != NIL and (rows.shard[placement] != shard or rows.segment[placement] != segment):
            placement = rows.next[placement]
        return placement

    def _unlink_from_block(self, placement: int) -> None:
        rows, block = self.rows, self.rows.block[placement]
        head = self._blocks.placement[block]
        if head == placement:
            self._blocks.placement[block] = rows.next[placement]
        else:
            while rows.next[head] != placement:
                head = rows.next[head]
            rows.next[head] = rows.next[placement]

    def check_integrity(self) -> None:
        """Assert that each copy is on the list that it belongs on, and blocks wait where their last copy lies."""
        for totals in (self.memory, self.disk):
            tier = [segment for segment in self.segments.values() if segment.totals is totals]
            assert totals.surplus_bytes == sum(segment.surplus_bytes for segment in tier)
            assert totals.used_bytes == sum(segment.used_bytes for segment in tier)
            assert totals.capacity_bytes == sum(segment.capacity_bytes for segment in tier)
        for segment in self.segments.values():
            placements = list(self.of_segment(segment))
            surplus = [placement for placement in placements if self.is_surplus(placement)]
            assert len(surplus) == segment.surplus_blocks
            assert bool(surplus) == bool(segment.surplus_bytes)
            assert placements[len(placements) - len(surplus) :] == surplus, "surplus copies have their own list"
            for owner, copies in segment.surplus.items():
                own = [p for p in surplus if self._blocks.owner(self.rows.block[p]) == owner]
                assert (copies.first, copies.last) == (own[0], own[-1])
            assert all(self.rows.segment[placement] == segment.number for placement in placements)
            for block in {self.rows.block[placement] for placement in placements}:
                assert self._blocks.home_segment[block] == self.rows.segment[self._last(block)]

    def _remove_one_of_several(self, placement: int, segment: Segment, slot_bytes: int) -> None:
        block, is_surplus = self.rows.block[placement], self.is_surplus(placement)
        heir = NIL if is_surplus else self._heir(placement)
        self._unlink_from_block(placement)
        self._pull(placement, segment, slot_bytes, is_surplus=is_surplus)
        if heir != NIL:
            self._promote(heir, slot_bytes)
        self._settle_home(block)

    def _heir(self, placement: int) -> int:
        """The surplus copy that takes over from a primary one, or NIL."""
        rows, heir = self.rows, NIL
        for other in self.of_block(rows.block[placement]):
            if other == placement:
                break
            if rows.shard[other] == rows.shard[placement]:
                heir = other
        return heir

    def _last(self, block: int) -> int:
        last = NIL
        for placement in self.of_block(block):
            last = placement
        return last

    def _settle_home(self, block: int) -> None:
        """The block waits to be evicted where its oldest primary copy lies."""
        self._blocks.home_segment[block] = self.rows.segment[self._last(block)]

    def _promote(self, placement: int, slot_bytes: int) -> None:
        segment = self.segments[self.rows.segment[placement]]
        self._pull(placement, segment, slot_bytes, is_surplus=True)
        self._push(placement, segment, slot_bytes, is_surplus=False)

    def _push(self, placement: int, segment: Segment, slot_bytes: int, *, is_surplus: bool) -> None:
        """Put the placement in front of one of its segment's lists."""
        if not is_surplus:
            link(self.rows, placement, segment.first)
            segment.first = placement
            return
        owner = self._blocks.owner(self.rows.block[placement])
        segment.surplus.setdefault(owner, SurplusList()).push(self.rows, placement)
        self._count_surplus(segment, owner, 1, slot_bytes)

    def _pull(self, placement: int, segment: Segment, slot_bytes: int, *, is_surplus: bool) -> None:
        """Take the placement off its segment's list."""
        if not is_surplus:
            if segment.first == placement:
                segment.first = self.rows.segment_next[placement]
            unlink(self.rows, placement)
            return
        owner = self._blocks.owner(self.rows.block[placement])
        copies = segment.surplus[owner]
        copies.pull(self.rows, placement)
        if copies.first == NIL:
            del segment.surplus[owner]
        self._count_surplus(segment, owner, -1, -slot_bytes)

    def _count_surplus(self, segment: Segment, owner: int, count: int, size_bytes: int) -> None:
        segment.surplus_blocks += count
        segment.surplus_bytes += size_bytes
        segment.totals.surplus_bytes += size_bytes
        if not segment.is_disk:
            self._tenants.surplus[owner] += size_bytes

    def _use(self, segment: Segment, namespace: int, size_bytes: int) -> None:
        """Account for bytes on ``segment`` that a namespace's blocks take, or give back if below 0."""
        segment.used_bytes += size_bytes
        segment.totals.used_bytes += size_bytes
        segment.of_tenants[self._blocks.owners[namespace]] += size_bytes
