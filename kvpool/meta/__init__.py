"""The metadata service: the directory and the membership of nodes, behind gRPC and the framed protocol."""

from kvpool.meta.server import MetaServer

__all__ = ["MetaServer"]
