"""The store node: owns segments of memory, their slots and headers, and serves their bytes."""

from kvpool.node.server import NodeServer

__all__ = ["NodeServer"]
