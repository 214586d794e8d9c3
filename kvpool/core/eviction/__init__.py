"""Eviction policies, by name; adding one is one file and one line here."""

from collections.abc import Callable

from kvpool.core.directory.table import BlockTable
from kvpool.core.errors import SettingsError
from kvpool.core.eviction.base import DORMANT, VISIBLE, Candidate, EvictionPolicy
from kvpool.core.eviction.leaf_lru import LeafLru
from kvpool.core.eviction.leaf_worth import LeafWorth

__all__ = ["DORMANT", "POLICIES", "VISIBLE", "Candidate", "EvictionPolicy", "LeafLru", "LeafWorth", "create_policy"]

POLICIES: dict[str, Callable[[BlockTable], EvictionPolicy]] = {"default": LeafWorth, "lru": LeafLru}


def create_policy(name: str, blocks: BlockTable) -> EvictionPolicy:
    """A new policy over ``blocks``.

    Raises:
        SettingsError: No policy has this name.
    """
    if name not in POLICIES:
        raise SettingsError(f"eviction policy {name!r} is not known; use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](blocks)
