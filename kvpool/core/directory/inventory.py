"""What nodes report by themselves: inventories, blocks that are gone or bad, and the loss of a node."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvpool.core.clock import microseconds
from kvpool.core.directory.copying import give_up_segment
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL, NO_SLOT, BlockState
from kvpool.core.directory.tombstones import MissReason


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


def announce(
    state: DirectoryState, segment: Segment, entry: NamespaceEntry, blocks: Iterable[AnnouncedBlock]
) -> list[bool]:
    """See `Directory.announce`."""
    return [_announce_one(state, segment, entry, block) for block in blocks]


def gone(
    state: DirectoryState,
    segment: Segment,
    entry: NamespaceEntry,
    block_hash: bytes,
    slot: int,
    generation: int,
    reason: MissReason,
    *,
    order: bool,
) -> bool:
    """Drop the placement that is exactly this slot and generation; False when the directory has moved on."""
    row = state.chains.indexes[entry.number].get(block_hash, NIL)
    rows = state.placements.rows
    for placement in state.placements.of_block(row) if row != NIL else ():
        where = (rows.segment[placement], rows.slot[placement], rows.generation[placement])
        if where == (segment.number, slot, generation):
            state.drop_placement(placement, reason, order=order)
            return True
    return False


def lose_segment(state: DirectoryState, segment: Segment) -> int:
    """Drop every placement of ``segment``, its own list only, and close it. Returns the placements dropped."""
    give_up_segment(state, segment)
    placements = list(state.placements.of_segment(segment))
    for placement in placements:
        # A block in flight goes whole at its first lost shard, and takes its other placements with it.
        if state.placements.rows.segment[placement] == segment.number and placement_is_live(state, placement):
            state.drop_placement(placement, MissReason.NODE_DOWN, order=False)
    state.placements.remove_segment(segment)
    state.freed.pop(segment.number, None)
    state.policy.lost(segment.number)
    del state.segments_by_id[segment.segment_id]
    state.counts["lost_blocks"] += len(placements)
    return len(placements)


def placement_is_live(state: DirectoryState, placement: int) -> bool:
    """Whether the row is in use."""
    return state.placements.rows.block[placement] != NIL


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
    return True
