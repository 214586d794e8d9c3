"""Writing through the directory: reserve, commit, abort."""

from kvpool.core.clock import microseconds
from kvpool.core.directory import copying
from kvpool.core.directory.chains import Index
from kvpool.core.directory.lookup import visible_prefix
from kvpool.core.directory.placing import Asked
from kvpool.core.directory.results import CommitStatus, ReserveResult, Share, Want
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL, NO_SLOT, BlockState
from kvpool.core.directory.tenants import BYTES, WRITES
from kvpool.core.directory.tombstones import Cause, MissReason
from kvpool.core.errors import InvalidHashError, NamespaceMismatchError
from kvpool.core.keys import count_hashes, hash_at, split_hashes
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX, RESERVE_BLOCKS_MAX

HOLE_FACTOR = 3

Committed = tuple[bytes, int, int, int, int]
"""(hash, shard, slot, generation, checksum) of one written shard."""


def reserve(
    state: DirectoryState,
    namespace_id: bytes,
    hashes: bytes,
    first: int,
    parent: bytes,
    owner: str,
    ttl_s: float,
) -> ReserveResult:
    """See `Directory.reserve`."""
    blocks = count_hashes(hashes, MATCH_BLOCKS_MAX)
    if not 0 <= first < blocks or blocks - first > RESERVE_BLOCKS_MAX:
        raise InvalidHashError(
            f"first is {first} of {blocks} hashes; reserve from 1 to {RESERVE_BLOCKS_MAX} blocks at a time"
        )
    entry = state.entry(namespace_id)
    state.expire()
    index = state.chains.indexes[entry.number]
    missing_from = _missing_ancestor(state, index, hashes, first, parent)
    if missing_from is not None:
        return ReserveResult(0, b"", {}, missing_from)
    chain = split_hashes(hashes[first * HASH_BYTES :])
    if len(set(chain)) != len(chain):
        raise InvalidHashError("a hash stands twice in the chain; each block has its own")
    above = hash_at(hashes, first - 1) if first else parent
    if state.chains.would_loop(entry.number, chain, above):
        raise NamespaceMismatchError("the chain's parent is stored below the chain: give the hashes from their root")
    return _Writer(state, entry, index, owner, ttl_s).reserve(chain, above, first)


def commit(
    state: DirectoryState, reservation_number: int, segment_id: bytes, written: list[Committed]
) -> list[CommitStatus]:
    """See `Directory.commit`."""
    copy = state.copies.get(reservation_number)
    if copy is not None:
        return copying.commit(state, copy, segment_id, written)
    reservation = state.reservations.get(reservation_number)
    segment = state.segments_by_id.get(segment_id)
    if reservation is None or segment is None:
        return [CommitStatus.STALE] * len(written)
    index = state.chains.indexes[reservation.namespace]
    rows, blocks = state.placements.rows, state.blocks
    now_us = state.now_us()
    statuses: list[CommitStatus] = []
    for block_hash, shard, slot, generation, checksum in written:
        row = index.get(block_hash, NIL)
        placement = state.placements.find(row, shard, segment.number) if row in reservation.rows else NIL
        if placement == NIL or slot == NO_SLOT or rows.slot[placement] != NO_SLOT:
            statuses.append(CommitStatus.STALE)
            continue
        rows.slot[placement] = slot
        rows.generation[placement] = generation
        rows.checksum[placement] = checksum
        blocks.missing_shards[row] -= 1
        if not blocks.missing_shards[row]:
            state.reservations.release(row)
            blocks.last_use_us[row] = now_us
            state.chains.complete(row)
        statuses.append(CommitStatus.COMMITTED)
    state.entries[reservation.namespace].stored_shards += statuses.count(CommitStatus.COMMITTED)
    return statuses


def abort(state: DirectoryState, reservation_number: int, hashes: list[bytes] | None, *, crowded: bool) -> int:
    """See `Directory.abort`."""
    copy = state.copies.get(reservation_number)
    if copy is not None:
        return state.give_up(copy, list(copy.rows) if hashes is None else hashes)
    reservation = state.reservations.get(reservation_number)
    if reservation is None:
        return 0
    if hashes is None:
        rows = list(reservation.rows)
    else:
        index = state.chains.indexes[reservation.namespace]
        rows = [row for h in dict.fromkeys(hashes) if (row := index.get(h, NIL)) in reservation.rows]
    for row in rows:
        segments = {state.placements.rows.segment[p] for p in state.placements.of_block(row)} if crowded else set()
        state.remove_block(row, MissReason.EXPIRED, Cause.ABORTED)
        for segment in segments:
            _make_hole(state, segment, state.entries[reservation.namespace])
    return len(rows)


def _make_hole(state: DirectoryState, number: int, entry: NamespaceEntry) -> None:
    """Evict from a segment whose free pages are too scattered for a slot.

    Neighbours in a chain are often neighbours in memory: a few slots' worth of the oldest leaves leave a hole.
    """
    segment, now_us = state.placements.segments[number], state.now_us()
    if segment.spared_until_us > now_us:
        return
    goal_bytes = segment.used_bytes - HOLE_FACTOR * entry.slot_bytes
    while segment.used_bytes > goal_bytes:
        if not state.placer.make_room_on(segment, entry.account.number, now_us):
            return


class _Writer:
    """One `reserve`: walks the slice block by block, placing what is wanted."""

    def __init__(self, state: DirectoryState, entry: NamespaceEntry, index: Index, owner: str, ttl_s: float) -> None:
        self.state = state
        self.entry = entry
        self.index = index
        self.now_us = state.now_us()
        self.deadline_us = self.now_us + microseconds(ttl_s)
        self.reservation = state.reservations.open(entry.number, owner, self.deadline_us)
        self.shares: dict[tuple[int, int], Share] = {}
        self.writes = entry.account.writes
        self.allowed = RESERVE_BLOCKS_MAX if self.writes is None else max(0, self.writes.whole)
        """New blocks that the tenant's rate of writes allows yet."""
        self.begun = False
        """Whether there was a new block yet, of which the eviction policy says its use."""
        self.asked = Asked(entry.slot_bytes, 0, entry.account.number, self.now_us)

    def reserve(self, chain: list[bytes], above: bytes, first: int) -> ReserveResult:
        state, wants = self.state, bytearray(len(chain))
        above_row = self.index.get(above, NIL)
        near = None if self._branches(above_row) else self._segment_of(above_row)
        i = 0
        while i < len(chain):
            row = self._present(chain[i], above, first + i)
            if row != NIL:
                near = self._segment_of(row) or near
                in_flight = state.blocks.state[row] == BlockState.IN_FLIGHT
                wants[i] = Want.IN_FLIGHT if in_flight else Want.EXISTS
                i += 1
                near = None if self._branches(row) else near
            elif self.allowed and (placed := self._place_new(chain, i, above, near)):
                near, count = placed
                i += count
            else:
                wants[i:] = bytes([Want.NO_ROOM]) * (len(chain) - i)
                self._count_refused(len(chain) - i)
                break
            above = chain[i - 1]
        return self._result(bytes(wants))

    def _place_new(self, chain: list[bytes], i: int, above: bytes, near: Segment | None) -> tuple[Segment, int] | None:
        """Reserve new blocks from ``i`` on, without evicting as long as that goes; where, and how many."""
        if not self.begun:
            self.begun = True
            use = self.state.policy.begins(self.index.get(above, NIL), chain[i:], self.now_us)
            self.asked = self.asked._replace(use=use)
        placed = self._place_run(chain, i, above, near) or self._place(chain, i, above, near)
        if placed is not None and self.writes is not None:
            self.writes.take(placed[1])
            self.allowed -= placed[1]
        return placed

    def _count_refused(self, blocks: int) -> None:
        state, account = self.state, self.entry.account
        room_bytes = state.tenants.room_bytes(account.number)
        if not self.allowed:
            account.refused[WRITES] += blocks
        elif room_bytes is not None and room_bytes < self.entry.slot_bytes * self.entry.namespace.shards:
            account.refused[BYTES] += blocks
        else:
            state.counts["refused_blocks"] += blocks

    def _present(self, block_hash: bytes, above: bytes, block: int) -> int:
        """The row of a block that need not be written, or NIL."""
        state = self.state
        row = self.index.get(block_hash, NIL)
        if row == NIL:
            return NIL
        if state.chains.parent_hash(row) != above:
            raise self._not_one_chain(block)
        if state.blocks.state[row] == BlockState.DORMANT and state.blocks.missing_shards[row]:
            # A shard was lost: write the block anew rather than wait for a node that may never come back.
            state.remove_block(row, MissReason.NODE_DOWN)
            return NIL
        return row

    def _place_run(
        self, chain: list[bytes], start: int, above: bytes, near: Segment | None
    ) -> tuple[Segment, int] | None:
        """Reserve as many new blocks from ``start`` on as one segment takes without evicting; where, and how many."""
        state, slot_bytes, shards = self.state, self.entry.slot_bytes, self.entry.namespace.shards
        most = min(self.allowed, len(chain) - start)
        found = state.placer.room(slot_bytes * shards, near, self.asked.owner, most)
        if found is None:
            return None
        segment, most = found
        count = 1
        while count < most and chain[start + count] not in self.index:
            count += 1
        rows = state.chains.insert_run(self.entry.number, chain[start : start + count], above, shards, self.now_us)
        state.blocks.set_use(rows, self.asked.use)
        state.reservations.claim_run(self.reservation, rows)
        for shard in range(shards):
            state.placements.add_run(rows, shard, segment, slot_bytes)
            self._share(segment, shard).indexes.extend(range(start, start + count))
        return segment, count

    def _place(self, chain: list[bytes], i: int, above: bytes, near: Segment | None) -> tuple[Segment, int] | None:
        """Reserve all shards of one block, evicting what must go; None, with nothing changed, if nothing can.

        The row is linked before room is made: as an in-flight child it keeps its ancestors from being the victims.
        """
        state, slot_bytes, shards = self.state, self.entry.slot_bytes, self.entry.namespace.shards
        row = state.chains.insert(self.entry.number, chain[i], above, shards, self.now_us)
        state.blocks.use[row] = self.asked.use
        state.reservations.claim(self.reservation, row)
        segments: list[Segment] = []
        for shard in range(shards):
            segment = state.placer.choose(self.asked, near)
            if segment is None:
                state.remove_block(row, MissReason.COLD)
                return None
            state.placements.add(row, shard, segment, slot_bytes)
            segments.append(segment)
            near = segment
        for shard, segment in enumerate(segments):
            self._share(segment, shard).indexes.append(i)
        return segments[-1], 1

    def _share(self, segment: Segment, shard: int) -> Share:
        share = self.shares.get((segment.number, shard))
        if share is None:
            share = self.shares[segment.number, shard] = Share()
        return share

    def _branches(self, row: int) -> bool:
        """Whether the block has a child already: a new one begins a branch, which may lie on any segment.

        Near its parent the heads of all chains would meet on the node of the prompt that they share, and go with it.
        """
        return row != NIL and self.state.blocks.first_child[row] != NIL

    def _segment_of(self, row: int) -> Segment | None:
        if row == NIL or self.state.blocks.placement[row] == NIL:
            return None
        segment = self.state.placements.segments.get(self.state.blocks.home_segment[row])
        if segment is not None and segment.is_disk:
            return self.state.placements.memory_of(segment.node_id)
        return segment

    def _result(self, wants: bytes) -> ReserveResult:
        for number in {number for number, _ in self.shares}:
            # Ranks come to the node in any order: each frees about what it needs itself.
            ranks = [share for (segment, _), share in self.shares.items() if segment == number]
            for i, order in enumerate(self.state.freed.pop(number, ())):
                ranks[i % len(ranks)].victims.append(order)
        if not self.shares:
            self.state.reservations.close(self.reservation)
            return ReserveResult(0, wants, {}, None)
        return ReserveResult(self.reservation.number, wants, self.shares, None)

    def _not_one_chain(self, block: int) -> NamespaceMismatchError:
        if not self.reservation.rows:
            self.state.reservations.close(self.reservation)
        for row in list(self.reservation.rows):
            self.state.remove_block(row, MissReason.EXPIRED, Cause.ABORTED)
        return NamespaceMismatchError(
            f"hashes[{block}] is stored below another parent: the hashes are not one chain; give them from the root"
        )


def _missing_ancestor(state: DirectoryState, index: Index, hashes: bytes, first: int, parent: bytes) -> int | None:
    if parent and parent not in index:
        return -1
    if not first:
        return None
    for block in range(visible_prefix(state, index, hashes, first), first):
        if hash_at(hashes, block) not in index:
            return block
    return None
