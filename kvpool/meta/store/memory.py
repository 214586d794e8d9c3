"""The store of a service that keeps its directory itself."""

from kvpool.core.clock import Clock
from kvpool.core.directory import Directory, DirectoryConfig
from kvpool.meta.store.base import Store


def open_memory_store(clock: Clock, config: DirectoryConfig) -> Store:
    """The directory itself: a call costs no more than the method does. Not thread-safe: its shell holds one lock."""
    return Directory(clock, config)
