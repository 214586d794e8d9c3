"""What the pool loses: single slots that are gone or bad, and whole segments when a node goes.

A lost segment is closed at once (nothing is placed or committed there) and emptied in slices, so that readers come in
between. Until its slice is reached a block may still be offered; reading it is a miss, as it was before the loss was
noticed. A node that returns meanwhile opens a segment of its own: what it announces is a second copy, and stays.
"""

from kvpool.core.directory.copying import give_up_segment
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL
from kvpool.core.directory.tombstones import Cause, MissReason


def gone(
    state: DirectoryState,
    segment: Segment,
    entry: NamespaceEntry,
    block_hash: bytes,
    slot: int,
    generation: int,
    reason: MissReason,
    cause: Cause,
    *,
    order: bool,
) -> bool:
    """Drop the placement that is exactly this slot and generation; False when the directory has moved on."""
    row = state.chains.indexes[entry.number].get(block_hash, NIL)
    rows = state.placements.rows
    for placement in state.placements.of_block(row) if row != NIL else ():
        where = (rows.segment[placement], rows.slot[placement], rows.generation[placement])
        if where == (segment.number, slot, generation):
            state.drop_placement(placement, reason, cause, order=order)
            return True
    return False


def close_segment(state: DirectoryState, segment: Segment) -> None:
    """Take the segment out of the pool; `drop_lost` drops what lies there."""
    segment.open = segment.accepts = False
    give_up_segment(state, segment)
    if segment.is_disk:
        del state.disks[segment.node_id]
    del state.segments_by_id[segment.segment_id]
    state.counts["lost_blocks"] += segment.blocks
    state.lost.append(segment)


def drop_lost(state: DirectoryState, most: int) -> int:
    """Drop up to ``most`` placements of lost segments, the newest of each first; returns how many are left.

    Surplus copies come last: who is sent there turns to another copy.
    The newest first are mostly children before their parents: what they hand up meets the nearest one that stays.
    """
    while state.lost and most > 0:
        segment = state.lost[0]
        while segment.blocks and most > 0:
            # A block in flight goes whole at its first lost shard, and takes its other placements with it.
            placement = next(state.placements.of_segment(segment))
            state.drop_placement(placement, MissReason.NODE_DOWN, order=False)
            most -= 1
        if not segment.blocks:
            _forget(state, segment)
    return sum(segment.blocks for segment in state.lost)


def _forget(state: DirectoryState, segment: Segment) -> None:
    state.lost.remove(segment)
    state.placements.remove_segment(segment)
    state.freed.pop(segment.number, None)
    state.policy.lost(segment.number)
