"""The tier below a node's memory: its blocks on disk."""

from kvpool.node.disk.files import DiskFiles
from kvpool.node.disk.store import DiskStore

__all__ = ["DiskFiles", "DiskStore"]
