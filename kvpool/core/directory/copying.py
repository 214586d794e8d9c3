"""Copying blocks from one segment to another: order, commit, abort.

The order goes to the destination's node, which reads from the source as any client does and commits like a writer.
"""

from collections.abc import Sequence

from kvpool.core.directory.copies import Copy
from kvpool.core.directory.outbox import Outbox
from kvpool.core.directory.results import CommitStatus
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL, NO_SLOT, Reuse

COPY_BLOCKS_MAX = 256
COPY_BYTES_MAX = 16 << 20
"""Blocks and bytes of one copy: its node holds the bytes of one at a time, and others may be ordered meanwhile."""

COPIES_OPEN_MAX = 4
"""Copies to one segment at a time: enough that its node never waits for the next one."""

Written = tuple[bytes, int, int, int, int]
"""(hash, shard, slot, generation, checksum) of one block."""


def copy_blocks_max(entry: NamespaceEntry) -> int:
    """Blocks of a namespace that one copy takes at most."""
    return min(COPY_BLOCKS_MAX, COPY_BYTES_MAX // entry.slot_bytes or 1)


def order_copy(
    state: DirectoryState, rows: Sequence[int], shard: int, source: Segment, destination: Segment, ttl_us: int
) -> Copy | None:
    """Order ``rows``, all of one namespace and with a copy of ``shard`` on ``source``, to be fetched.

    As many as fit the destination and the limits of a copy, from the first on; None when that is none of them.
    """
    entry = state.entries[state.blocks.namespace[rows[0]]]
    most = min(copy_blocks_max(entry), destination.free_bytes // entry.slot_bytes)
    if most <= 0:
        return None
    copy = Copy(
        number=state.reservations.next_number(),
        namespace=entry.number,
        shard=shard,
        source=source,
        destination=destination,
        slot_bytes=entry.slot_bytes,
        deadline_us=state.now_us() + ttl_us,
    )
    for row in rows[:most]:
        _add(state, copy, row)
    state.placements.promise(destination, copy.namespace, len(copy.rows) * copy.slot_bytes)
    state.copies.open(copy)
    state.outboxes.setdefault(destination.node_id, Outbox()).push_copy(copy.number)
    return copy


def commit(state: DirectoryState, copy: Copy, segment_id: bytes, written: list[Written]) -> list[CommitStatus]:
    """The destination's node has written some blocks of ``copy``; see `Directory.commit`."""
    statuses: list[CommitStatus] = []
    for block_hash, shard, slot, generation, checksum in written:
        row = copy.rows.get(block_hash, NIL)
        is_asked = segment_id == copy.destination.segment_id and shard == copy.shard and slot != NO_SLOT
        if row == NIL or not is_asked:
            statuses.append(CommitStatus.STALE)
            continue
        state.give_up(copy, [block_hash])
        if state.placements.find(row, shard, copy.destination.number) != NIL:
            statuses.append(CommitStatus.STALE)
            continue
        _place(state, copy, row, slot, generation, checksum)
        statuses.append(CommitStatus.COMMITTED)
    return statuses


def give_up_segment(state: DirectoryState, segment: Segment) -> None:
    """A segment goes: nothing is copied to it any more; what is copied from it may have been read already."""
    for copy in state.copies:
        if copy.destination is segment:
            state.give_up(copy, list(copy.rows))


def holders(state: DirectoryState, row: int, shard: int) -> set[str]:
    """Nodes that hold ``shard`` of a block, or were told to fetch it; none while it is being written."""
    rows, segments = state.placements.rows, state.placements.segments
    placements = [p for p in state.placements.of_block(row) if rows.shard[p] == shard and rows.slot[p] != NO_SLOT]
    here = [segments[rows.segment[p]] for p in placements]
    nodes = {segment.node_id for segment in here if segment.open}
    return nodes | {copy.destination.node_id for copy in state.copies.of_row(row) if copy.shard == shard}


def _add(state: DirectoryState, copy: Copy, row: int) -> None:
    rows, block_hash = state.placements.rows, state.blocks.hash[row]
    placement = state.placements.find(row, copy.shard, copy.source.number)
    assert placement != NIL
    assert rows.slot[placement] != NO_SLOT
    copy.rows[block_hash] = row
    copy.hashes.append(block_hash)
    copy.parents.append(state.chains.parent_hash(row))
    copy.slots.append(rows.slot[placement])
    copy.generations.append(rows.generation[placement])
    copy.checksums.append(rows.checksum[placement])


def _place(state: DirectoryState, copy: Copy, row: int, slot: int, generation: int, checksum: int) -> None:
    """A fetched block has a further placement; the first one, if its source went meanwhile."""
    rows = state.placements.rows
    former = state.placements.primary(row, copy.shard)
    placement = state.placements.add(row, copy.shard, copy.destination, copy.slot_bytes)
    rows.slot[placement], rows.generation[placement], rows.checksum[placement] = slot, generation, checksum
    state.counts["copied_blocks"] += 1
    state.counts["copied_bytes"] += copy.slot_bytes
    if former == NIL:
        state.complete_shard(row)
    elif copy.destination.is_disk:
        # What is in memory is surplus from now on: evicting it costs nothing.
        state.make_primary(placement)
        state.blocks.reused[row] = Reuse.READ
        state.counts["demoted_blocks"] += 1
    elif not state.placements.segments[rows.segment[former]].accepts:
        # Its node drains: this copy is to stay when that one goes.
        state.make_primary(placement)
    state.counts["promoted_blocks"] += copy.source.is_disk
