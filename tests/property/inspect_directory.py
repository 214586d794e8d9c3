"""Reads a directory's tables for the oracles of the property tests: the only tests that know how it keeps them."""

from dataclasses import dataclass

from kvpool.core.directory import BlockState, Directory

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
    def age_key(self) -> tuple[int, int]:
        """Order of eviction: dormant before visible, then by last use."""
        return (int(self.state == BlockState.VISIBLE), self.last_use_us)

    def is_evictable(self, now_us: int) -> bool:
        """Whether it is a leaf that is committed and not held."""
        return self.is_leaf and self.state > BlockState.IN_FLIGHT and self.held_until_us <= now_us


def inspect(directory: Directory) -> dict[Key, BlockView]:
    """All entries of ``directory``."""
    state = directory._state
    return {
        (namespace.id, block_hash): _view(directory, row)
        for namespace, index in zip(directory.namespaces(), state.chains.indexes, strict=True)
        for block_hash, row in index.items()
    }


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
