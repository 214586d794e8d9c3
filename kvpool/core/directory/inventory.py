"""What nodes announce by themselves when they join: the slots they hold, in parts and in any order.

Most of a part is new and of one shard: those blocks are taken in as columns, a microsecond each. Whatever needs a
decision (known already, waited for, ordered free, of several shards) goes one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvpool.core.clock import microseconds
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL, NO_SLOT, BlockState, view


@dataclass(frozen=True, slots=True)
class AnnouncedBlock:
    """One committed slot as its node found it; ``age_s`` is the time since its last use, as far as the node knows."""

    hash: bytes
    parent: bytes
    shard: int
    slot: int
    generation: int
    checksum: int
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Inventory:
    """Part of a node's inventory: columns of `AnnouncedBlock`, equally long; a root's parent is empty."""

    hashes: list[bytes]
    parents: list[bytes]
    shards: NDArray[np.uint16]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    ages_s: NDArray[np.float32]

    @classmethod
    def of(cls, blocks: Sequence[AnnouncedBlock]) -> Self:
        """The columns of ``blocks``."""
        return cls(
            [block.hash for block in blocks],
            [block.parent for block in blocks],
            np.array([block.shard for block in blocks], np.uint16),
            np.array([block.slot for block in blocks], np.uint32),
            np.array([block.generation for block in blocks], np.uint64),
            np.array([block.checksum for block in blocks], np.uint64),
            np.array([block.age_s for block in blocks], np.float32),
        )

    def __len__(self) -> int:
        return len(self.hashes)

    def block(self, i: int) -> AnnouncedBlock:
        """One of them."""
        return AnnouncedBlock(
            hash=self.hashes[i],
            parent=self.parents[i],
            shard=int(self.shards[i]),
            slot=int(self.slots[i]),
            generation=int(self.generations[i]),
            checksum=int(self.checksums[i]),
            age_s=float(self.ages_s[i]),
        )

    def select(self, chosen: Sequence[int]) -> "Inventory":
        """Some of them."""
        if len(chosen) == len(self):
            return self
        return Inventory(
            [self.hashes[i] for i in chosen],
            [self.parents[i] for i in chosen],
            self.shards[chosen],
            self.slots[chosen],
            self.generations[chosen],
            self.checksums[chosen],
            self.ages_s[chosen],
        )


def announce(state: DirectoryState, segment: Segment, entry: NamespaceEntry, part: Inventory) -> NDArray[np.bool_]:
    """See `Directory.announce`."""
    segment.spared_until_us = state.spared_until_us
    wanted = np.zeros(len(part), np.bool_)
    chosen = _plain(state, segment, entry, part)
    if chosen and _take_all(state, segment, entry, part.select(chosen)):
        wanted[chosen] = True
    for i in np.flatnonzero(~wanted).tolist():
        wanted[i] = _announce_one(state, segment, entry, part.block(i))
    return wanted


def _plain(state: DirectoryState, segment: Segment, entry: NamespaceEntry, part: Inventory) -> list[int]:
    """Indexes of the blocks that need no decision; all fit the segment."""
    outbox = state.outboxes.get(segment.node_id)
    if entry.namespace.shards != 1 or not (outbox is None or outbox.frees_nothing):
        return []
    if len(set(part.hashes)) != len(part) or segment.free_bytes < len(part) * entry.slot_bytes:
        return []
    index, waiting = state.chains.indexes[entry.number], state.chains.waiting[entry.number]
    sound = ((part.shards == 0) & (part.slots != NO_SLOT)).tolist()
    return [i for i, h in enumerate(part.hashes) if sound[i] and h not in index and h not in waiting]


def _take_all(state: DirectoryState, segment: Segment, entry: NamespaceEntry, part: Inventory) -> bool:
    """Take in blocks that nothing is known of; False, with nothing changed, when some are their own ancestors."""
    places = dict(zip(part.hashes, range(len(part)), strict=True))
    above = np.array([places.get(parent, NIL) for parent in part.parents], np.int32)
    top = _tops(above)
    if top is None:
        return False
    now_us = state.now_us()
    rows = state.chains.insert_forest(entry.number, part.hashes, part.parents, above, now_us)
    used_us = now_us - (part.ages_s.astype(np.float64) * 1e6)
    view(state.blocks.last_use_us)[rows] = np.maximum(used_us, 0).astype(np.int64)
    columns = (part.slots, part.generations, part.checksums)
    state.placements.add_committed(rows, segment, entry.slot_bytes, *columns)
    state.chains.complete_forest(rows, top)
    return True


def _tops(above: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """For each block the highest ancestor in the part, itself at the top; None when some form a ring.

    Doubles the step each time round: as many times as the longest chain's length has digits.
    """
    is_top = above < 0
    top = np.where(is_top, np.arange(len(above), dtype=np.int32), above)
    for _ in range(len(above).bit_length()):
        if is_top[top].all():
            return top
        top = top[top]
    return top if is_top[top].all() else None


def _announce_one(state: DirectoryState, segment: Segment, entry: NamespaceEntry, block: AnnouncedBlock) -> bool:
    outbox = state.outboxes.get(segment.node_id)
    if outbox is not None and outbox.has_freed(segment.segment_id, block.slot, block.generation):
        return False
    if block.shard >= entry.namespace.shards or block.slot == NO_SLOT or segment.free_bytes < entry.slot_bytes:
        return False
    row = state.chains.indexes[entry.number].get(block.hash, NIL)
    if row == NIL:
        if block.parent == block.hash or state.chains.would_loop(entry.number, [block.hash], block.parent):
            return False
        now_us = state.now_us() - microseconds(block.age_s)
        row = state.chains.insert(entry.number, block.hash, block.parent, entry.namespace.shards, max(0, now_us))
    elif state.blocks.state[row] == BlockState.IN_FLIGHT or state.chains.parent_hash(row) != block.parent:
        return False
    return _place_announced(state, segment, entry, row, block)


def _place_announced(
    state: DirectoryState, segment: Segment, entry: NamespaceEntry, row: int, block: AnnouncedBlock
) -> bool:
    rows = state.placements.rows
    known = [p for p in state.placements.of_block(row) if rows.shard[p] == block.shard]
    if any(rows.segment[p] == segment.number or rows.slot[p] == NO_SLOT for p in known):
        return False
    placement = state.placements.add(row, block.shard, segment, entry.slot_bytes)
    rows.slot[placement] = block.slot
    rows.generation[placement] = block.generation
    rows.checksum[placement] = block.checksum
    if not known:
        state.complete_shard(row)
    elif segment.is_disk:
        state.make_primary(placement)
    elif not state.placements.segments[rows.segment[state.placements.primary(row, block.shard)]].open:
        state.make_primary(placement)  # the other one goes with the rest of its lost segment
    return True
