"""Reading the directory: how long a prefix is there, and where its blocks lie."""

from array import array
from collections.abc import Sequence

import numpy as np

from kvpool.core.clock import microseconds
from kvpool.core.directory import tiering
from kvpool.core.directory.chains import Index
from kvpool.core.directory.results import Location, Match
from kvpool.core.directory.state import DirectoryState, LatestMiss, NamespaceEntry
from kvpool.core.directory.table import NIL, BlockState
from kvpool.core.directory.tenants import LOOKUPS
from kvpool.core.directory.tombstones import MissReason
from kvpool.core.errors import InvalidHashError
from kvpool.core.keys import count_hashes, hash_at
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX

NUMPY_ROWS_MIN = 24
"""Fewer values are gathered faster one by one."""

LEASE_MARGIN_S = 0.25
"""The grantor holds a lease this much longer than it says, so that it outlasts the holder's own count."""


_UNSURE = (MissReason.COLD, MissReason.PARENT_MISSING)


def match(state: DirectoryState, namespace_id: bytes, hashes: bytes, first: int, lease_s: float) -> Match:
    """See `Directory.match`."""
    blocks = _check_first(hashes, first)
    entry = state.entry(namespace_id)
    state.counts["lookups"] += 1
    entry.asked_blocks += blocks
    if entry.account.lookups is not None and not _may_ask(state, entry):
        return Match(0, MissReason.QUOTA)
    index = state.chains.indexes[entry.number]
    matched = visible_prefix(state, index, hashes, blocks)
    if lease_s > 0 and matched:
        matched = _within_cap(state, entry, index, hashes, first, matched)
    entry.matched_blocks += matched
    lease = 0
    if matched:
        now_us = state.now_us()
        row = index[hash_at(hashes, matched - 1)]
        if state.blocks.held_until_us[row] <= now_us:  # else it is the same use: a scheduler that asks again
            state.policy.matched(row, now_us)
        state.blocks.last_use_us[row] = now_us
        if lease_s > 0 and matched > first:
            until_us = now_us + microseconds(lease_s + LEASE_MARGIN_S)
            state.hold(row, until_us)
            lease = state.leases.grant(row, (matched - first) * _block_bytes(entry), until_us)
    reason = _reason(state, entry, hashes, matched, blocks)
    if reason is not None:
        state.misses[reason] += 1
        missing = hash_at(hashes, matched)
        state.latest_misses.append(LatestMiss(state.now_us(), entry.number, missing, reason, matched, blocks))
    return Match(matched, reason, lease)


def release(state: DirectoryState, lease: int) -> bool:
    """See `Directory.release`."""
    row = state.leases.release(lease)
    if row is None:
        return False
    state.blocks.held_until_us[row] = state.leases.until_us(row)
    state.policy.changed(row)
    return True


def locate(state: DirectoryState, namespace_id: bytes, hashes: bytes, first: int, shard: int | None) -> Location:
    """See `Directory.locate`."""
    blocks = _check_first(hashes, first)
    entry = state.entry(namespace_id)
    if entry.account.lookups is not None and not _may_ask(state, entry, promised=True):
        return Location.nothing(MissReason.QUOTA)
    index = state.chains.indexes[entry.number]
    matched = visible_prefix(state, index, hashes, blocks)
    if matched:
        state.blocks.last_use_us[index[hash_at(hashes, matched - 1)]] = state.now_us()
    reason = _reason(state, entry, hashes, matched, blocks)
    location = _gather(state, index, hashes, first, max(matched, first), shard, reason)
    entry.read_shards += location.blocks * (entry.namespace.shards if shard is None else 1)
    return location


def visible_prefix(state: DirectoryState, index: Index, hashes: bytes, blocks: int) -> int:
    """Length of the visible prefix: gallop, then bisect. Visible blocks are prefix-closed, so O(log n) look-ups do."""
    states = state.blocks.state
    low, step = 0, 1
    while low < blocks:
        probe = min(low + step, blocks) - 1
        row = index.get(hash_at(hashes, probe), NIL)
        if row == NIL or states[row] != BlockState.VISIBLE:
            break
        low, step = probe + 1, step * 2
    else:
        return blocks
    high = probe
    while low < high:
        middle = (low + high) // 2
        row = index.get(hash_at(hashes, middle), NIL)
        if row == NIL or states[row] != BlockState.VISIBLE:
            high = middle
        else:
            low = middle + 1
    return low


def explain(state: DirectoryState, entry: NamespaceEntry, block_hash: bytes) -> MissReason | None:
    """Why ``block_hash`` cannot be matched; None if it can."""
    reason = _known_reason(state, entry, block_hash)
    # A node that has yet to report may hold the block, or its ancestor.
    return MissReason.RECOVERING if state.recovering and reason in _UNSURE else reason


def _known_reason(state: DirectoryState, entry: NamespaceEntry, block_hash: bytes) -> MissReason | None:
    row = state.chains.indexes[entry.number].get(block_hash, NIL)
    if row == NIL:
        tombstone = state.tombstones.find(entry.number, block_hash)
        return tombstone.reason if tombstone else MissReason.COLD
    block_state = state.blocks.state[row]
    if block_state == BlockState.VISIBLE:
        return None
    if block_state == BlockState.IN_FLIGHT:
        return MissReason.IN_FLIGHT
    if state.blocks.missing_shards[row]:
        tombstone = state.tombstones.find(entry.number, block_hash)
        unknown = MissReason.RECOVERING if state.recovering else MissReason.NODE_DOWN
        return tombstone.reason if tombstone else unknown
    return MissReason.PARENT_MISSING


def _may_ask(state: DirectoryState, entry: NamespaceEntry, *, promised: bool = False) -> bool:
    """Whether the tenant's rate allows a look-up now; one that was ``promised`` by a match may use what is to come."""
    lookups = entry.account.lookups
    if lookups is None or lookups.take(in_advance=promised):
        return True
    entry.account.refused[LOOKUPS] += 1
    state.misses[MissReason.QUOTA] += 1
    return False


def _check_first(hashes: bytes, first: int) -> int:
    blocks = count_hashes(hashes, MATCH_BLOCKS_MAX)
    if not 0 <= first < blocks:
        raise InvalidHashError(f"first is {first}; it must be an index into the {blocks} hashes")
    return blocks


def _reason(
    state: DirectoryState, entry: NamespaceEntry, hashes: bytes, matched: int, blocks: int
) -> MissReason | None:
    return None if matched == blocks else explain(state, entry, hash_at(hashes, matched))


def _within_cap(
    state: DirectoryState, entry: NamespaceEntry, index: Index, hashes: bytes, first: int, matched: int
) -> int:
    """Blocks of a match that may be leased: all while there is room, else what the cap allows."""
    memory = state.placements.memory
    capacity_bytes = memory.capacity_bytes
    # Surplus copies give way to whatever comes: they make no pool full.
    if memory.used_bytes - memory.surplus_bytes <= state.config.pressure * capacity_bytes:
        return matched
    state.leases.expire(state.now_us())
    spare_bytes = int(state.config.lease_cap * capacity_bytes) - state.leases.held_bytes
    charged_bytes = state.leases.charge(index[hash_at(hashes, matched - 1)])
    if (matched - first) * _block_bytes(entry) <= spare_bytes + charged_bytes:
        return matched
    # A shorter match leases another block: what this one is charged already stays charged.
    allowed = min(matched, first + max(0, spare_bytes // _block_bytes(entry)))
    if allowed < matched:
        state.counts["matches_shortened"] += 1
    return allowed


def _block_bytes(entry: NamespaceEntry) -> int:
    return entry.slot_bytes * entry.namespace.shards


def _gather(
    state: DirectoryState,
    index: Index,
    hashes: bytes,
    first: int,
    end: int,
    shard: int | None,
    reason: MissReason | None,
) -> Location:
    rows = state.placements.rows
    block_rows = _visible_rows(state, index, hashes, first, end)
    now_us = state.now_us()
    state.heat.note(block_rows, now_us)
    if state.disks and block_rows:
        tiering.note_reads(state, block_rows, now_us)
    block: Sequence[int] = range(len(block_rows))
    heads: Sequence[int] = _take(state.blocks.placement, block_rows)
    if not _all_are(_take(rows.next, heads), NIL):
        block, heads = _all_copies(state, block_rows)
    if shard is not None and not _all_are(_take(rows.shard, heads), shard):
        chosen = [i for i, found in enumerate(_take(rows.shard, heads)) if found == shard]
        block, heads = [block[i] for i in chosen], [heads[i] for i in chosen]
    return Location(
        blocks=len(block_rows),
        block=array("I", block),
        shard=_take(rows.shard, heads),
        segment=_take(rows.segment, heads),
        slot=_take(rows.slot, heads),
        generation=_take(rows.generation, heads),
        checksum=_take(rows.checksum, heads),
        reason=reason,
    )


def _visible_rows(state: DirectoryState, index: Index, hashes: bytes, first: int, end: int) -> list[int]:
    """Rows of the slice; cut at the first hole, which only a list that is not one chain can have."""
    find = index.get
    found = [find(hashes[at : at + HASH_BYTES], NIL) for at in range(first * HASH_BYTES, end * HASH_BYTES, HASH_BYTES)]
    # NIL would count from the column's end: it is looked at first.
    if NIL not in found and _all_are(_take(state.blocks.state, found), BlockState.VISIBLE):
        return found
    holes = (i for i, row in enumerate(found) if row == NIL or state.blocks.state[row] != BlockState.VISIBLE)
    return found[: next(holes)]


def _all_copies(state: DirectoryState, block_rows: list[int]) -> tuple[list[int], list[int]]:
    pairs = [(i, p) for i, row in enumerate(block_rows) for p in state.placements.of_block(row)]
    return [i for i, _ in pairs], [p for _, p in pairs]


def _all_are(values: "array[int]", value: int) -> bool:
    return values.count(value) == len(values)


def _take(column: "array[int]", rows: Sequence[int]) -> "array[int]":
    """The column's values at ``rows``."""
    if len(rows) < NUMPY_ROWS_MIN:
        return array(column.typecode, [column[row] for row in rows])
    # A view of an array locks its size while it lives: take the copy and let the view go.
    taken = np.frombuffer(column, column.typecode)[np.asarray(rows, np.int64)]
    return array(column.typecode, taken.tobytes())
