"""The segments blocks can be placed on, how full they are, and the placements on each."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NEVER_US, NIL, BlockTable, PlacementTable, Rows, view


@dataclass(slots=True)
class Segment:
    """One kind of memory of one store node.

    Attributes:
        number: The directory's short name for it; never reused while the directory lives.
        capacity_bytes: Bytes its slots may take.
        used_bytes: Sum of the slots of its placements, reserved and committed.
        retired_bytes: What bad memory has taken off the capacity.
        accepts: False while its node drains or is lost: nothing new is placed there.
        spared_until_us: Nothing is evicted before: leases that an earlier service gave may still run.
        first: First row of its list of placements.
        blocks: Length of that list.
    """

    number: int
    segment_id: bytes
    node_id: str
    capacity_bytes: int
    used_bytes: int = 0
    retired_bytes: int = 0
    accepts: bool = True
    spared_until_us: int = NEVER_US
    first: int = NIL
    blocks: int = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that can be placed without evicting."""
        return self.capacity_bytes - self.used_bytes

    @property
    def fill(self) -> float:
        """Used share of the capacity."""
        return self.used_bytes / self.capacity_bytes


class Placements:
    """Which block lies where: keeps the two lists every placement is on, and the segments' accounts.

    Every byte is accounted here and nowhere else, so `used_bytes` is the sum of the slots by construction.
    """

    def __init__(self, blocks: BlockTable) -> None:
        self.rows = PlacementTable()
        self.segments: dict[int, Segment] = {}
        self.capacity_bytes = 0
        self.used_bytes = 0
        self._blocks = blocks

    def add_segment(self, segment: Segment) -> None:
        """Open an empty segment."""
        self.segments[segment.number] = segment
        self.capacity_bytes += segment.capacity_bytes

    def remove_segment(self, segment: Segment) -> None:
        """Close a segment whose placements are all gone."""
        assert segment.first == NIL
        del self.segments[segment.number]
        self.capacity_bytes -= segment.capacity_bytes

    def add(self, block: int, shard: int, segment: Segment, slot_bytes: int) -> int:
        """Reserve ``slot_bytes`` on ``segment`` for one shard of ``block``."""
        rows = self.rows
        placement = rows.add(block, shard, segment.number)
        head = self._blocks.placement[block]
        if head == NIL:
            self._blocks.home_segment[block] = segment.number
        rows.next[placement] = head
        self._blocks.placement[block] = placement
        rows.segment_next[placement] = segment.first
        rows.segment_previous[placement] = NIL
        if segment.first != NIL:
            rows.segment_previous[segment.first] = placement
        segment.first = placement
        segment.blocks += 1
        segment.used_bytes += slot_bytes
        self.used_bytes += slot_bytes
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
        segment.used_bytes += count * slot_bytes
        self.used_bytes += count * slot_bytes

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
        segment.used_bytes += count * slot_bytes
        self.used_bytes += count * slot_bytes

    def remove(self, placement: int, slot_bytes: int) -> None:
        """Take the placement off its block and its segment and give its bytes back."""
        rows = self.rows
        self._unlink_from_block(placement)
        segment = self.segments[rows.segment[placement]]
        before, after = rows.segment_previous[placement], rows.segment_next[placement]
        if before == NIL:
            segment.first = after
        else:
            rows.segment_next[before] = after
        if after != NIL:
            rows.segment_previous[after] = before
        segment.blocks -= 1
        segment.used_bytes -= slot_bytes
        self.used_bytes -= slot_bytes
        rows.free(placement)

    def of_block(self, block: int) -> Iterator[int]:
        """Placement rows of ``block``; safe against removal of the row just given."""
        placement = self._blocks.placement[block]
        while placement != NIL:
            following = self.rows.next[placement]
            yield placement
            placement = following

    def of_segment(self, segment: Segment) -> Iterator[int]:
        """Placement rows of ``segment``; safe against removal of the row just given."""
        placement = segment.first
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
        remaining = self._blocks.placement[block]
        if remaining != NIL:
            self._blocks.home_segment[block] = rows.segment[remaining]
