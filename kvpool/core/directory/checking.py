"""Invariants that tables, links and accounts must keep."""

from kvpool.core.directory.state import DirectoryState
from kvpool.core.directory.table import NO_SLOT, BlockState


def check_integrity(state: DirectoryState) -> None:
    """See `Directory.check_integrity`."""
    state.chains.check_integrity()
    state.leases.check_integrity()
    used = dict.fromkeys(state.placements.segments, 0)
    for copy in state.copies:
        used[copy.destination.number] += len(copy.rows) * copy.slot_bytes
        assert all(state.blocks.hash[row] == block_hash for block_hash, row in copy.rows.items())
    for index in state.chains.indexes:
        for row in index.values():
            _check_placements(state, row, used)
    state.placements.check_integrity()
    for segment in state.placements.segments.values():
        assert segment.used_bytes == used[segment.number], "bytes used are the sum of the slots and promises"
        assert segment.blocks == sum(1 for _ in state.placements.of_segment(segment))


def _check_placements(state: DirectoryState, row: int, used: dict[int, int]) -> None:
    rows, placements = state.placements.rows, list(state.placements.of_block(row))
    committed = {rows.shard[p] for p in placements if rows.slot[p] != NO_SLOT}
    entry = state.entries[state.blocks.namespace[row]]
    assert len(committed) + state.blocks.missing_shards[row] == entry.namespace.shards
    assert placements or state.blocks.state[row] == BlockState.IN_FLIGHT
    assert (state.reservations.of_row(row) is not None) == (state.blocks.state[row] == BlockState.IN_FLIGHT)
    for placement in placements:
        assert rows.block[placement] == row
        used[rows.segment[placement]] += entry.slot_bytes
