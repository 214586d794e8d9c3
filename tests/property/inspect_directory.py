"""Reads a directory's tables for the oracles of the property tests: the only tests that know how it keeps them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.core.directory import BlockState, Copy, Directory, HotRun
from kvpool.core.namespace import Namespace

Key = tuple[bytes, bytes]
"""(namespace id, block hash)."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """One entry of the directory."""

    state: BlockState
    parent: bytes
    missing_shards: int
    last_use_us: int
    held_until_us: int
    home_segment: int
    is_leaf: bool

    @property
    def rank(self) -> int:
        """Dormant blocks go before visible ones."""
        return int(self.state == BlockState.VISIBLE)

    @property
    def is_committed(self) -> bool:
        return self.state > BlockState.IN_FLIGHT

    @property
    def is_partial(self) -> bool:
        """Whether a shard of it was lost, or has not been announced yet."""
        return self.state == BlockState.DORMANT and self.missing_shards > 0


Views = dict[Key, BlockView]


def inspect(directory: Directory) -> Views:
    """All entries of ``directory``."""
    state = directory._state
    return {
        (namespace.id, block_hash): _view(directory, row)
        for namespace, index in zip(directory.namespaces(), state.chains.indexes, strict=True)
        for block_hash, row in index.items()
    }


def open_copies(directory: Directory) -> list[Copy]:
    """Copies that nodes were told to fetch and have not committed."""
    return list(directory._state.copies)


def hot_run(directory: Directory, namespace: Namespace, hashes: list[bytes], copies: int) -> HotRun:
    """A chain that deserves so many copies."""
    index = directory._state.chains.indexes[directory.namespaces().index(namespace)]
    return HotRun(tuple(index[h] for h in hashes if h in index), copies)


@dataclass
class Evictions:
    """What one reserve evicted, held against the rules of eviction.

    Attributes:
        before: The directory when it began.
        after: The directory when it ended.
        rewritten: Blocks that had lost a shard and were to be written anew; they went for that reason.
        spared: The parent of a block that found no room: it was no leaf while that was tried.
        may_go: Whether a leaf could have been evicted.
        tenant_of: Whose a block is.
    """

    before: Views
    after: Views
    rewritten: set[Key]
    spared: Key | None
    may_go: Callable[[BlockView], bool]
    tenant_of: Callable[[Key], str]
    evicted: set[Key] = field(init=False)

    def __post_init__(self) -> None:
        stayed = {key for key, block in self.after.items() if block.is_committed}
        committed = {key for key, block in self.before.items() if block.is_committed}
        self.evicted = committed - stayed - self.rewritten
        self._children = defaultdict(list)
        for key, block in self.before.items():
            self._children[key[0], block.parent].append(key)

    def check_leaves_went_first(self) -> None:
        """No block, in flight or not, lost its parent."""
        gone = self.evicted - self.after.keys()
        assert not any((namespace, block.parent) in gone for (namespace, _), block in self.after.items())

    def check_fairness(self, taker: str, taker_is_above: bool, is_within: Callable[[str], bool]) -> None:
        """Nobody who was within its share lost a visible block to a tenant above its own that could have given one."""
        stayed = (key for key, block in self.after.items() if key != self.spared and self.may_go(block))
        could_give = any(
            self.tenant_of(key) == taker and key in self.before and self.may_go(self.before[key]) for key in stayed
        )
        if taker_is_above and could_give:
            lost = [key for key in self.evicted if self.before[key].rank and self.tenant_of(key) != taker]
            assert not any(is_within(self.tenant_of(key)) for key in lost)

    def check_copies_went_first(self, surplus_blocks: int) -> None:
        """No visible block went while another could have lost a copy."""
        assert not surplus_blocks or not any(self.before[key].rank for key in self.evicted)

    def check_oldest_went_first(self, now_us: int, age_slack: float) -> None:
        """No evicted block was hotter than a leaf of its tenant that stayed.

        A leaf that became one meanwhile carries the last use of what was evicted below it, and one of those was a
        candidate all the time: so comparing with the leaves of the end is exact.
        """
        stayed = defaultdict(list)
        for key, block in self.after.items():
            if key in self.before and key != self.spared and self.may_go(block):
                stayed[self.tenant_of(key)].append(block)
        for key in self.evicted:
            rank, last_use_us = self.before[key].rank, self._last_use_us(key)
            for block in stayed[self.tenant_of(key)]:
                assert rank <= block.rank, "dormant blocks go first"
                if rank == block.rank:
                    slack_us = age_slack * max(0, now_us - block.last_use_us)
                    assert last_use_us <= block.last_use_us + slack_us, "the oldest leaf of the pool goes first"

    def _last_use_us(self, key: Key) -> int:
        """At its eviction, when what was below it had gone before."""
        below = [self._last_use_us(child) for child in self._children[key] if child in self.evicted]
        return max([self.before[key].last_use_us, *below])


def _view(directory: Directory, row: int) -> BlockView:
    state = directory._state
    return BlockView(
        BlockState(state.blocks.state[row]),
        state.chains.parent_hash(row),
        state.blocks.missing_shards[row],
        state.blocks.last_use_us[row],
        state.blocks.hold_us(row),
        state.blocks.home_segment[row],
        next(state.chains.children(row), None) is None,
    )
