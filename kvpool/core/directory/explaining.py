"""All that the directory knows of one block, for people who ask why a look-up missed."""

from dataclasses import dataclass, replace

from kvpool.core.directory.lookup import explain
from kvpool.core.directory.state import DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL, NO_SLOT, BlockState
from kvpool.core.directory.tombstones import Cause, MissReason
from kvpool.core.limits import MATCH_BLOCKS_MAX

_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a block can or cannot be matched.

    Attributes:
        reason: None when it can be matched.
        cause: What made it leave, if it left.
        nodes: Where it is (and whether on disk alone), or was before it left; of a block in flight, where it is being
            written.
        ago_s: Since it left, or was last used.
        idle_s: How long it had not been used when it left.
        fill: Used share of the pool's capacity when it left.
        owner: Who writes it, of a block in flight.
        deadline_s: Until its writer must have finished.
        missing: The nearest ancestor that cannot be matched for a reason of its own.
        missing_reason: That reason.
    """

    reason: MissReason | None
    cause: Cause | None = None
    nodes: tuple[str, ...] = ()
    ago_s: float | None = None
    idle_s: float | None = None
    fill: float | None = None
    owner: str = ""
    deadline_s: float | None = None
    missing: bytes = b""
    missing_reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """How far back removed blocks are remembered: all of them, or those of the last ``since_s`` seconds."""

    full: bool
    since_s: float | None


def explain_block(state: DirectoryState, entry: NamespaceEntry, block_hash: bytes) -> Explanation:
    """See `Directory.explain_block`."""
    reason = explain(state, entry, block_hash)
    row = state.chains.indexes[entry.number].get(block_hash, NIL)
    if row == NIL or (state.blocks.missing_shards[row] and state.blocks.state[row] == BlockState.DORMANT):
        return _left(state, entry, block_hash, reason)
    here = Explanation(reason, nodes=_nodes(state, row), ago_s=_since(state, state.blocks.last_use_us[row]))
    if reason == MissReason.IN_FLIGHT:
        reservation = state.reservations.of_row(row)
        assert reservation is not None, "a block in flight is somebody's"
        left_s = (reservation.deadline_us - state.now_us()) * _MICRO
        return replace(here, ago_s=None, owner=reservation.owner, deadline_s=left_s)
    if reason == MissReason.PARENT_MISSING:
        missing = _missing_ancestor(state, row)
        return replace(here, missing=missing, missing_reason=explain(state, entry, missing))
    return here


def memory(state: DirectoryState) -> Memory:
    """See `Directory.memory`."""
    oldest_us = state.tombstones.oldest_us()
    return Memory(state.tombstones.full, None if oldest_us is None else _since(state, oldest_us))


def _left(state: DirectoryState, entry: NamespaceEntry, block_hash: bytes, reason: MissReason | None) -> Explanation:
    tombstone = state.tombstones.find(entry.number, block_hash)
    if tombstone is None:
        return Explanation(reason)
    return Explanation(
        reason,
        cause=tombstone.cause,
        nodes=(tombstone.node,) if tombstone.node else (),
        ago_s=_since(state, tombstone.at_us),
        idle_s=(tombstone.at_us - tombstone.last_use_us) * _MICRO,
        fill=tombstone.used_bytes / tombstone.capacity_bytes if tombstone.capacity_bytes else None,
    )


def _missing_ancestor(state: DirectoryState, row: int) -> bytes:
    """Hash of the nearest block above ``row`` that is absent, in flight, or without one of its shards."""
    blocks = state.blocks
    for _ in range(MATCH_BLOCKS_MAX):
        parent = blocks.parent[row]
        if parent < 0 or blocks.missing_shards[parent]:
            break
        row = parent
    return state.chains.parent_hash(row)


def _nodes(state: DirectoryState, row: int) -> tuple[str, ...]:
    rows, segments = state.placements.rows, state.placements.segments
    in_flight = state.blocks.state[row] == BlockState.IN_FLIGHT
    placed = [p for p in state.placements.of_block(row) if in_flight or rows.slot[p] != NO_SLOT]
    here = [segments[rows.segment[p]] for p in placed]
    in_memory = {segment.node_id for segment in here if not segment.is_disk}
    on_disk = {segment.node_id for segment in here if segment.is_disk}
    return tuple(sorted([*in_memory, *(f"{node_id} (disk)" for node_id in on_disk - in_memory)]))


def _since(state: DirectoryState, at_us: int) -> float:
    return (state.now_us() - at_us) * _MICRO
