"""A node's blocks go to other nodes before it leaves: the most recently used first, while there is room for them.

Touches are on the deepest matched block alone, so a block is as recent as the most recent one below it. `Survey` copies
the columns that say so, in one step; it is put in order without the directory's lock.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvpool.core.clock import microseconds
from kvpool.core.directory.copying import COPIES_OPEN_MAX, COPY_BLOCKS_MAX, holders, order_copy
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.state import DirectoryState
from kvpool.core.directory.table import NIL, BlockState

Kind = tuple[int, int, int]
"""(namespace, source segment, shard): what one copy has in common."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Which rows lie on a node's segments, and what decides their order."""

    parent: NDArray[np.int32]
    last_use_us: NDArray[np.int64]
    live: NDArray[np.bool_]
    here: NDArray[np.bool_]

    def in_order(self) -> "array[int]":
        """The node's blocks, the most recently used first, ancestors before what is below them."""
        seen, ordered = bytearray(len(self.parent)), array("i")
        parent, here = self.parent.tolist(), self.here.tolist()
        live = np.flatnonzero(self.live)
        for leaf in live[np.argsort(-self.last_use_us[live], kind="stable")].tolist():
            chain: list[int] = []
            row = leaf
            while row >= 0 and not seen[row]:
                seen[row] = 1
                chain.append(row)
                row = parent[row]
            ordered.extend(row for row in reversed(chain) if here[row])
        return ordered


@dataclass(slots=True)
class Drain:
    """One node's blocks on their way to others.

    Attributes:
        node_id: The node.
        rows: What is still to be looked at in this pass.
        exhausted: Whether that has come to an end.
        waiting: Blocks that were looked at and have no order yet, each with its kind.
        ordered: Blocks that this pass has ordered copies of.
        has_room: False once no other node had room.
    """

    node_id: str
    rows: Iterator[int] = field(default_factory=lambda: iter(()))
    exhausted: bool = True
    waiting: list[tuple[int, Kind]] = field(default_factory=list)
    ordered: int = 0
    has_room: bool = True

    def begin(self, rows: Iterable[int]) -> None:
        """Begin another pass."""
        self.rows, self.exhausted, self.waiting, self.ordered = iter(rows), False, [], 0


def segments_of(state: DirectoryState, node_id: str) -> list[Segment]:
    """The node's open segments."""
    return [segment for segment in state.placements.segments.values() if segment.open and segment.node_id == node_id]


def survey(state: DirectoryState, node_id: str) -> Survey:
    """What lies on the node now."""
    blocks, placements = state.blocks, state.placements.rows
    numbers = [segment.number for segment in segments_of(state, node_id)]
    # Copies: a view of an array locks its size while it lives.
    block = np.array(placements.block, np.int32)
    on_node = np.isin(np.array(placements.segment, np.uint16), numbers) & (block >= 0)
    here = np.zeros(len(blocks), np.bool_)
    here[block[on_node]] = True
    live = np.array(blocks.state, np.uint8) > BlockState.IN_FLIGHT
    return Survey(np.array(blocks.parent, np.int32), np.array(blocks.last_use_us, np.int64), live, here)


def advance(state: DirectoryState, drain: Drain, ttl_s: float) -> bool:
    """Order the next copy, if some node has room for it and not enough to do; whether there may be another one."""
    if not drain.has_room:
        return False
    if not drain.waiting:
        _look_further(state, drain)
    if not drain.waiting:
        return not drain.exhausted
    kind = drain.waiting[0][1]
    namespace, source, shard = kind
    slot_bytes = state.entries[namespace].slot_bytes
    roomy = [s for s in state.placements.segments.values() if _may_take(s, drain.node_id, slot_bytes)]
    drain.has_room = bool(roomy)
    idle = [segment for segment in roomy if state.copies.count_to(segment) < COPIES_OPEN_MAX]
    if not idle:
        return False
    destination = min(idle, key=lambda segment: (segment.fill, segment.number))
    some = [row for row, its_kind in drain.waiting if its_kind == kind and _is_to_move(state, row, kind)]
    drain.waiting = [item for item in drain.waiting if item[1] != kind]
    if some:
        copy = order_copy(state, some, shard, state.placements.segments[source], destination, microseconds(ttl_s))
        done = len(copy.hashes) if copy is not None else 0
        drain.ordered += done
        drain.waiting[:0] = [(row, kind) for row in some[done:]]
    return True


def is_idle(state: DirectoryState, drain: Drain) -> bool:
    """Whether this pass has come to its end: nothing is left to order, and nothing that was ordered is on its way."""
    if drain.has_room and (drain.waiting or not drain.exhausted):
        return False
    return not any(copy.source.node_id == drain.node_id for copy in state.copies)


def _look_further(state: DirectoryState, drain: Drain) -> None:
    """Look at the next blocks; what has a copy elsewhere needs none, but that one is to stay."""
    drain.exhausted = True
    for row in islice(drain.rows, COPY_BLOCKS_MAX):
        drain.exhausted = False
        for placement in _placements(state, row, drain.node_id):
            rows = state.placements.rows
            kind = (state.blocks.namespace[row], rows.segment[placement], rows.shard[placement])
            if _is_to_move(state, row, kind):
                drain.waiting.append((row, kind))
            else:
                _prefer_elsewhere(state, row, kind[2])


def _placements(state: DirectoryState, row: int, node_id: str) -> list[int]:
    """A committed block's placements on the node; rows may be other blocks' by now."""
    if state.blocks.state[row] <= BlockState.IN_FLIGHT:
        return []
    numbers = {segment.number for segment in segments_of(state, node_id)}
    return [p for p in state.placements.of_block(row) if state.placements.rows.segment[p] in numbers]


def _is_to_move(state: DirectoryState, row: int, kind: Kind) -> bool:
    """Whether the block still lies there, and no other node that stays has its shard or fetches it."""
    namespace, source, shard = kind
    if state.blocks.state[row] <= BlockState.IN_FLIGHT or state.blocks.namespace[row] != namespace:
        return False
    if state.placements.find(row, shard, source) == NIL or not state.placements.segments[source].open:
        return False
    staying = {segment.node_id for segment in state.placements.segments.values() if segment.accepts}
    return not holders(state, row, shard) & staying


def _prefer_elsewhere(state: DirectoryState, row: int, shard: int) -> None:
    """Let a copy on a node that stays be the primary one: surplus copies go first when room is needed."""
    rows = state.placements.rows
    for placement in state.placements.of_block(row):
        if rows.shard[placement] == shard and state.placements.segments[rows.segment[placement]].accepts:
            state.make_primary(placement)
            return


def _may_take(segment: Segment, node_id: str, slot_bytes: int) -> bool:
    return segment.takes_new and segment.node_id != node_id and segment.free_bytes >= slot_bytes
