"""What people look at: one block, the use of each namespace, what is read the most, what was missed lately.

Nothing here changes the directory, and each question is bounded: it is asked under the service's lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvpool.core.clock import FOREVER_US
from kvpool.core.directory.heat import HotHead
from kvpool.core.directory.state import DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL, NO_SLOT, BlockState
from kvpool.core.directory.tombstones import MissReason
from kvpool.core.limits import NAMESPACES_MAX
from kvpool.core.namespace import Namespace

CHILDREN_MAX = 100
"""Children counted of one block; a prompt that all requests share may have many thousands."""

HEAD_BLOCKS_MAX = 64
"""Blocks of one hot head that are looked up, spread over all of it."""

FOREVER_S = float("inf")

_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class CopyView:
    """One copy of one shard of a block; ``slot`` is None while it is written, ``surplus`` says that it goes first."""

    node_id: str
    medium: str
    segment_id: bytes
    segment: int
    shard: int
    slot: int | None
    generation: int
    checksum: int
    surplus: bool


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block of one namespace.

    Attributes:
        namespace: Which.
        state: See `BlockState`.
        parent: Hash of the block above; empty for the first of a chain.
        children: Blocks right below, counted up to `CHILDREN_MAX`.
        slot_bytes: What one copy of one shard takes.
        idle_s: Since its last use; that of a block above it is not noted, since the deepest one speaks for all.
        leases: Leases that end in this block; one that ends below it covers it too.
        leased_s: How long they still run; 0 without one.
        pinned_s: How long it is pinned: infinity until it is unpinned, 0 when it is not.
        copies: Where it is.
    """

    namespace: Namespace
    state: BlockState
    parent: bytes
    children: int
    slot_bytes: int
    idle_s: float
    leases: int
    leased_s: float
    pinned_s: float
    copies: tuple[CopyView, ...]


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """What a namespace holds, and what was asked of it since the service's start.

    Attributes:
        namespace: Which.
        blocks: Entries, those being written included.
        size_bytes: One copy of each of them, all shards.
        asked_blocks: Blocks that look-ups asked for, and of these ``matched_blocks`` that were there.
        matched_blocks: See above.
        read_bytes: Bytes that readers were told where to find: what moves over shared memory passes no server.
        stored_bytes: Bytes that writers committed.
    """

    namespace: Namespace
    blocks: int
    size_bytes: int
    asked_blocks: int
    matched_blocks: int
    read_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class HeadView:
    """Neighbours in a chain that are read alike.

    Attributes:
        namespace: Theirs.
        first: Hash of the first of them, and ``last`` of the last.
        last: See above.
        blocks: How many there are.
        reads_per_s: Of each.
        branches: Blocks right below the last, counted up to `CHILDREN_MAX`.
        nodes: Share of the blocks that each node holds a copy of.
    """

    namespace: Namespace
    first: bytes
    last: bytes
    blocks: int
    reads_per_s: float
    branches: int
    nodes: dict[str, float]


@dataclass(frozen=True, slots=True)
class MissView:
    """A look-up that ended early: why, how long ago, and after how many of the blocks it asked for."""

    namespace: Namespace
    missing: bytes
    reason: MissReason
    matched: int
    asked: int
    ago_s: float


class View:
    """A directory, to look at."""

    def __init__(self, state: DirectoryState) -> None:
        self._state = state

    def block(self, namespace_id: bytes, block_hash: bytes) -> BlockView | None:
        """One block; None when the namespace has no entry of it. Raises UnknownNamespaceError."""
        state, entry = self._state, self._state.entry(namespace_id)
        row = state.chains.indexes[entry.number].get(block_hash, NIL)
        if row == NIL:
            return None
        blocks = state.blocks
        return BlockView(
            namespace=entry.namespace,
            state=BlockState(blocks.state[row]),
            parent=state.chains.parent_hash(row),
            children=self._children(row),
            slot_bytes=entry.slot_bytes,
            idle_s=(state.now_us() - blocks.last_use_us[row]) * _MICRO,
            leases=state.leases.count(row),
            leased_s=self._left_s(state.leases.until_us(row)),
            pinned_s=self._pinned_s(row),
            copies=tuple(self._copy(placement) for placement in state.placements.of_block(row)),
        )

    def usage(self, begin: int = 0, most: int = NAMESPACES_MAX) -> list[NamespaceUsage]:
        """Namespaces from the ``begin``-th on, oldest first, at most so many."""
        return [self._usage(entry) for entry in self._state.entries[begin : begin + most]]

    def head(self, head: HotHead) -> HeadView | None:
        """What `Demand.heads` found, as far as it is there still."""
        blocks = self._state.blocks
        rows = [row for row in head.rows if blocks.state[row] == BlockState.VISIBLE]
        if not rows:
            return None
        return HeadView(
            namespace=self._state.entries[blocks.namespace[rows[0]]].namespace,
            first=blocks.hash[rows[0]],
            last=blocks.hash[rows[-1]],
            blocks=len(rows),
            reads_per_s=head.reads_per_s,
            branches=self._children(rows[-1]),
            nodes=self._shares(rows[:: -(-len(rows) // HEAD_BLOCKS_MAX)]),
        )

    def misses(self) -> list[MissView]:
        """The latest look-ups that ended early, the newest first."""
        now_us, entries = self._state.now_us(), self._state.entries
        return [
            MissView(
                entries[miss.namespace].namespace,
                miss.missing,
                miss.reason,
                miss.matched,
                miss.asked,
                (now_us - miss.at_us) * _MICRO,
            )
            for miss in reversed(self._state.latest_misses)
        ]

    def _usage(self, entry: NamespaceEntry) -> NamespaceUsage:
        blocks = len(self._state.chains.indexes[entry.number])
        size_bytes = blocks * entry.slot_bytes * entry.namespace.shards
        read_bytes = entry.read_shards * entry.namespace.block_bytes
        stored_bytes = entry.stored_shards * entry.namespace.block_bytes
        lookups = entry.asked_blocks, entry.matched_blocks
        return NamespaceUsage(entry.namespace, blocks, size_bytes, *lookups, read_bytes, stored_bytes)

    def _copy(self, placement: int) -> CopyView:
        rows, placements = self._state.placements.rows, self._state.placements
        segment, slot = placements.segments[rows.segment[placement]], rows.slot[placement]
        return CopyView(
            node_id=segment.node_id,
            medium=segment.medium,
            segment_id=segment.segment_id,
            segment=segment.number,
            shard=rows.shard[placement],
            slot=None if slot == NO_SLOT else slot,
            generation=rows.generation[placement],
            checksum=rows.checksum[placement],
            surplus=placements.is_surplus(placement),
        )

    def _children(self, row: int) -> int:
        return sum(1 for _ in islice(self._state.chains.children(row), CHILDREN_MAX))

    def _shares(self, rows: Sequence[int]) -> dict[str, float]:
        counts: dict[str, int] = {}
        placements = self._state.placements
        for row in rows:
            for node_id in {placements.segments[placements.rows.segment[p]].node_id for p in placements.of_block(row)}:
                counts[node_id] = counts.get(node_id, 0) + 1
        return {node_id: count / len(rows) for node_id, count in sorted(counts.items())}

    def _pinned_s(self, row: int) -> float:
        until_us = self._state.blocks.pinned_until_us.get(row)
        return 0.0 if until_us is None else self._left_s(until_us)

    def _left_s(self, until_us: int) -> float:
        return FOREVER_S if until_us == FOREVER_US else max(0.0, (until_us - self._state.now_us()) * _MICRO)
