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
    state.pins.check_integrity()
    _check_tenants(state)
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


def _check_tenants(state: DirectoryState) -> None:
    """Each tenant's bytes are those of its blocks' slots, and of what is promised to copies of them."""
    tenants, rows = state.tenants, state.placements.rows
    count = len(tenants.accounts)
    memory, disk, surplus = [0] * count, [0] * count, [0] * count
    for segment in state.placements.segments.values():
        used = disk if segment.is_disk else memory
        for placement in state.placements.of_segment(segment):
            entry = state.entries[state.blocks.namespace[rows.block[placement]]]
            used[entry.account.number] += entry.slot_bytes
            if not segment.is_disk and state.placements.is_surplus(placement):
                surplus[entry.account.number] += entry.slot_bytes
    for copy in state.copies:
        used = disk if copy.destination.is_disk else memory
        used[state.entries[copy.namespace].account.number] += copy.size_bytes
    assert list(tenants.memory) == memory
    assert list(tenants.disk) == disk
    assert list(tenants.surplus) == surplus
