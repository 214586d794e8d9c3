"""Further copies of what is read the most: which blocks, to which node, and how much room they may take."""

from kvpool.core.clock import microseconds
from kvpool.core.directory.copying import COPIES_OPEN_MAX, COPY_BLOCKS_MAX, holders, order_copy
from kvpool.core.directory.heat import HotRun
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState
from kvpool.core.directory.table import BlockState


def replicate(state: DirectoryState, run: HotRun, ttl_s: float) -> int:
    """Order one copy of blocks of ``run`` that have fewer copies than they deserve; how many blocks, 0 for none."""
    rows = _still_a_chain(state, run.rows)
    if not rows:
        return 0
    for shard in range(state.entries[state.blocks.namespace[rows[0]]].namespace.shards):
        needy = [row for row in rows if 0 < len(holders(state, row, shard)) < run.copies]
        if needy and (ordered := _copy(state, needy, shard, ttl_s)):
            return ordered
    return 0


def _copy(state: DirectoryState, needy: list[int], shard: int, ttl_s: float) -> int:
    """Copy the first of the ``needy`` that lie on one segment to a node that has none of them."""
    source = _source(state, needy[0], shard)
    destination = _destination(state, needy[0], shard)
    if destination is None or not source.open:
        return 0
    some = [row for row in needy[:COPY_BLOCKS_MAX] if _source(state, row, shard) is source]
    some = [row for row in some if destination.node_id not in holders(state, row, shard)]
    slot_bytes = state.entries[state.blocks.namespace[some[0]]].slot_bytes
    some = some[: _budget_bytes(state, destination) // slot_bytes]
    room_bytes = state.tenants.room_bytes(state.blocks.owner(some[0]))
    if room_bytes is not None:
        some = some[: max(0, room_bytes // slot_bytes)]
    if not some:
        return 0
    copy = order_copy(state, some, shard, source, destination, microseconds(ttl_s))
    return len(copy.hashes) if copy is not None else 0


def _still_a_chain(state: DirectoryState, rows: tuple[int, ...]) -> list[int]:
    """The first of ``rows`` that are visible and follow one another: rows may be other blocks' by now."""
    blocks = state.blocks
    found: list[int] = []
    for row in rows:
        is_next = not found or blocks.parent[row] == found[-1]
        if blocks.state[row] != BlockState.VISIBLE or not is_next:
            break
        found.append(row)
    return found


def _source(state: DirectoryState, row: int, shard: int) -> Segment:
    """Where to read it: the oldest copy in memory, else the one on disk."""
    rows, segments = state.placements.rows, state.placements.segments
    here = [segments[rows.segment[p]] for p in state.placements.of_block(row) if rows.shard[p] == shard]
    return next((segment for segment in reversed(here) if segment.open and not segment.is_disk), here[-1])


def _destination(state: DirectoryState, row: int, shard: int) -> Segment | None:
    """The emptiest segment that may take a copy, of a node that has none."""
    held, slot_bytes = holders(state, row, shard), state.entries[state.blocks.namespace[row]].slot_bytes
    able = [
        segment
        for segment in state.placements.segments.values()
        if segment.takes_new and segment.node_id not in held and _budget_bytes(state, segment) >= slot_bytes
        if state.copies.count_to(segment) < COPIES_OPEN_MAX
    ]
    return min(able, key=lambda segment: (segment.fill, segment.number), default=None)


def _budget_bytes(state: DirectoryState, segment: Segment) -> int:
    """Room for further copies: they may take part of what would be free without them."""
    copied_bytes = segment.surplus_bytes + state.copies.bytes_to(segment)
    return int(state.config.replica_budget * (segment.free_bytes + copied_bytes)) - copied_bytes
