"""Which blocks go from a node's memory to its disk, which come back, and which leave the disk when it is full.

A block that was read is worth its bytes on disk: it is copied there once its node's memory is nearly full, after the
ancestors that are not there yet. So what is on disk hangs together without what is in memory, and the copy in memory
becomes surplus: it can go without a word when room is needed. A block read from disk is copied to memory again. Nothing
here moves bytes: it orders copies (`copying.py`) from one segment of a node to another of the same node.
"""

from itertools import islice

import numpy as np

from kvpool.core.clock import microseconds
from kvpool.core.directory.copying import COPIES_OPEN_MAX, COPY_BLOCKS_MAX, copy_blocks_max, order_copy
from kvpool.core.directory.disk import Disk
from kvpool.core.directory.placing import Asked
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState
from kvpool.core.directory.table import NIL, NO_SLOT, BlockState, Reuse, view
from kvpool.core.eviction import DORMANT

WAITING_MAX = 1 << 16
"""Rows in one queue; a block that finds it full waits for its next read."""


def note_reads(state: DirectoryState, rows: list[int], now_us: int) -> None:
    """These blocks, neighbours in a chain, are about to be read."""
    blocks = state.blocks
    which = np.array(rows, np.int32)
    view(blocks.last_use_us)[which] = now_us  # what is in memory beside a copy on disk goes by its own last use
    homes = view(blocks.home_segment)[which]
    on_disk = np.isin(homes, [disk.segment.number for disk in state.disks.values()])
    for row in which[on_disk].tolist():
        _note_disk_read(state, row)
    fresh = (view(blocks.reused)[which] == Reuse.NONE) & ~on_disk
    for row in which[fresh].tolist():
        disk = state.disks.get(state.placements.segments[blocks.home_segment[row]].node_id)
        if disk is not None and len(disk.read) < WAITING_MAX:
            blocks.reused[row] = Reuse.READ
            disk.read.append(row)


def has_work(state: DirectoryState) -> bool:
    """Whether anything may wait to be copied to or from a disk; may be asked while others change the directory."""
    return any(disk.read or disk.leaving or disk.wanted for disk in list(state.disks.values()))


def advance(state: DirectoryState, ttl_s: float) -> int:
    """Order one copy, to memory before those to disk; the blocks ordered, 0 when there is nothing more to do now."""
    for step in (_promote, _demote):
        for disk in state.disks.values():
            if disk.segment.accepts and (ordered := step(state, disk, microseconds(ttl_s))):
                return ordered
    return 0


def _note_disk_read(state: DirectoryState, row: int) -> None:
    """Bring what is on disk alone to memory, and keep what is in memory too from going first."""
    blocks, rows, segments = state.blocks, state.placements.rows, state.placements.segments
    in_memory = False
    for placement in list(state.placements.of_block(row)):
        if not segments[rows.segment[placement]].is_disk:
            in_memory = True
            if state.placements.is_surplus(placement):
                state.placements.freshen(placement, state.entries[blocks.namespace[row]].slot_bytes)
    disk = state.disks[segments[blocks.home_segment[row]].node_id]
    if not in_memory and blocks.reused[row] != Reuse.WANTED and len(disk.wanted) < WAITING_MAX:
        blocks.reused[row] = Reuse.WANTED
        disk.wanted.append(row)


# To disk


def _demote(state: DirectoryState, disk: Disk, ttl_us: int) -> int:
    memory = state.placements.memory_of(disk.segment.node_id)
    if memory is None or memory.fill < state.config.demote_fill or _is_busy(state, disk.segment):
        return 0
    while disk.leaving or disk.read:
        while disk.read and len(disk.leaving) < COPY_BLOCKS_MAX:
            _add_with_ancestors(state, disk, disk.read.popleft())
        run = _first_run(state, disk)
        if run is None:
            continue
        source, shard, some = run
        _make_room(state, disk.segment, some)
        copy = order_copy(state, some, shard, source, disk.segment, ttl_us)
        if copy is not None:
            return len(copy.hashes)
        for row in disk.leaving:  # everything on disk is held: the next read makes another try
            state.blocks.reused[row] = Reuse.NONE
        disk.leaving.clear()
    return 0


def _add_with_ancestors(state: DirectoryState, disk: Disk, row: int) -> None:
    """Let a block leave for the disk, after those above it that are not there yet; not if one has no disk to go to."""
    blocks, chain = state.blocks, list[int]()
    if blocks.state[row] != BlockState.VISIBLE or blocks.reused[row] != Reuse.READ:
        return
    while row >= 0 and not state.placements.is_on_disk(row) and row not in disk.leaving:
        if _is_under_way(state, row, disk):
            break
        node_id = state.placements.segments[blocks.home_segment[row]].node_id
        other = state.disks.get(node_id)
        if other is None:
            return
        if other is disk:
            chain.append(row)
        elif blocks.reused[row] == Reuse.NONE:
            blocks.reused[row] = Reuse.READ
            other.read.append(row)
        row = blocks.parent[row]
    for row in reversed(chain):
        blocks.reused[row] = Reuse.READ
        disk.leaving[row] = blocks.hash[row]


def _first_run(state: DirectoryState, disk: Disk) -> tuple[Segment, int, list[int]] | None:
    """(source, shard, rows): what one copy can take to disk of the first blocks that leave; None without any."""
    blocks = state.blocks
    while disk.leaving:
        row = next(iter(disk.leaving))
        namespace = blocks.namespace[row]
        for shard in range(state.entries[namespace].namespace.shards):
            source = _in_memory(state, row, disk, shard)
            if source is None:
                continue
            some: list[int] = []
            for following in islice(disk.leaving, copy_blocks_max(state.entries[namespace])):
                is_like = blocks.namespace[following] == namespace
                if not is_like or _in_memory(state, following, disk, shard) is not source:
                    break
                some.append(following)
            return source, shard, some
        del disk.leaving[row]  # it is there by now, on its way, or gone
    return None


def _is_under_way(state: DirectoryState, row: int, disk: Disk) -> bool:
    return any(copy.destination is disk.segment for copy in state.copies.of_row(row))


def _in_memory(state: DirectoryState, row: int, disk: Disk, shard: int) -> Segment | None:
    """The memory of the disk's node, if a block that leaves is still to be copied from there, for the first time."""
    if state.blocks.hash[row] != disk.leaving[row] or state.blocks.state[row] != BlockState.VISIBLE:
        return None
    if state.blocks.reused[row] != Reuse.READ:
        return None
    if any(copy.shard == shard and copy.destination is disk.segment for copy in state.copies.of_row(row)):
        return None
    return _source(state, row, shard, disk.segment.node_id, on_disk=False)


def _source(state: DirectoryState, row: int, shard: int, node_id: str, *, on_disk: bool) -> Segment | None:
    """The node's segment that has a shard in one tier, if the other one has none of it."""
    rows, segments = state.placements.rows, state.placements.segments
    found: Segment | None = None
    for placement in state.placements.of_block(row):
        segment = segments[rows.segment[placement]]
        if rows.shard[placement] != shard or rows.slot[placement] == NO_SLOT or not segment.open:
            continue
        if segment.is_disk != on_disk:
            if segment.is_disk or segment.node_id == node_id:
                return None
        elif segment.node_id == node_id:
            found = segment
    return found


# To memory


def _promote(state: DirectoryState, disk: Disk, ttl_us: int) -> int:
    memory = state.placements.memory_of(disk.segment.node_id)
    if memory is None or not memory.accepts or _is_busy(state, memory):
        return 0
    while disk.wanted:
        namespace = state.blocks.namespace[disk.wanted[0]]
        for shard in range(state.entries[namespace].namespace.shards):
            some = _run_to_promote(state, disk, shard)
            if not some:
                continue
            copy = None
            if _fits_quota(state, some):
                _make_room(state, memory, some)
                copy = order_copy(state, some, shard, disk.segment, memory, ttl_us)
            if copy is not None:
                return len(copy.hashes)
        row = disk.wanted.popleft()  # it is there by now, on its way, or gone, or there is no room for it
        if state.blocks.reused[row] == Reuse.WANTED:
            state.blocks.reused[row] = Reuse.READ
    return 0


def _run_to_promote(state: DirectoryState, disk: Disk, shard: int) -> list[int]:
    """The first rows that one copy can bring to memory; none if the very first is not to be brought."""
    some: list[int] = []
    namespace = state.blocks.namespace[disk.wanted[0]]
    for row in islice(disk.wanted, copy_blocks_max(state.entries[namespace])):
        if state.blocks.namespace[row] != namespace or row in some or not _is_to_promote(state, disk, row, shard):
            break
        some.append(row)
    return some


def _is_to_promote(state: DirectoryState, disk: Disk, row: int, shard: int) -> bool:
    if state.blocks.state[row] != BlockState.VISIBLE or state.blocks.reused[row] != Reuse.WANTED:
        return False
    if any(copy.shard == shard for copy in state.copies.of_row(row)):
        return False
    return _source(state, row, shard, disk.segment.node_id, on_disk=True) is disk.segment


# Room


def _is_busy(state: DirectoryState, segment: Segment) -> bool:
    return state.copies.count_to(segment) >= COPIES_OPEN_MAX


def _fits_quota(state: DirectoryState, some: list[int]) -> bool:
    """Whether memory has room for the blocks within their tenant's quota, after it gave some of its own if it must."""
    entry = state.entries[state.blocks.namespace[some[0]]]
    size_bytes, use = len(some) * entry.slot_bytes, state.blocks.use[some[0]]
    return state.placer.fit_quota(Asked(size_bytes, use, entry.account.number, state.now_us()))


def _make_room(state: DirectoryState, segment: Segment, some: list[int]) -> None:
    """Let the oldest of ``segment`` go, as long as there is something that may and the room is not enough for blocks.

    Who gives is decided as for new blocks (`Tenants.givers`).
    """
    now_us, entry = state.now_us(), state.entries[state.blocks.namespace[some[0]]]
    size_bytes = len(some) * entry.slot_bytes
    used = state.tenants.disk if segment.is_disk else state.tenants.memory
    make = _make_room_on_disk if segment.is_disk else _make_room_in_memory
    while segment.free_bytes < size_bytes and segment.spared_until_us <= now_us:
        givers = state.tenants.givers(used, entry.account.number, size_bytes)
        if not any(make(state, segment, giver, now_us) for giver in givers):
            return


def _make_room_in_memory(state: DirectoryState, segment: Segment, giver: int, now_us: int) -> bool:
    """What has another copy, or was never read, gives way to what comes back; not the last copy of what was read."""
    surplus, victim = segment.last_surplus(giver), state.policy.first(segment.number, giver, now_us)
    if (
        victim is not None
        and state.blocks.reused[victim.row] == Reuse.NONE
        and (surplus == NIL or not state.placements.is_due(surplus, victim.last_use_us))
    ):
        state.evict(victim.row)
        return True
    if surplus == NIL or state.blocks.reused[state.placements.rows.block[surplus]] == Reuse.WANTED:
        return False  # what one shard of a block would make room for is another one of it
    state.reclaim(surplus)
    return True


def _make_room_on_disk(state: DirectoryState, segment: Segment, giver: int, now_us: int) -> bool:
    surplus, victim = segment.last_surplus(giver), state.policy.first(segment.number, giver, now_us)
    if surplus != NIL and (victim is None or victim.rank > DORMANT):
        state.reclaim(surplus)
        return True
    if victim is None or victim.row in state.disks[segment.node_id].leaving:
        return False
    here = [p for p in state.placements.of_block(victim.row) if state.placements.rows.segment[p] == segment.number]
    if all(_has_another(state, placement) for placement in here):
        for placement in here:
            state.drop_copy(placement)
    else:
        state.evict(victim.row)
    return True


def _has_another(state: DirectoryState, placement: int) -> bool:
    rows = state.placements.rows
    others = state.placements.of_block(rows.block[placement])
    return any(other != placement and rows.shard[other] == rows.shard[placement] for other in others)
