"""The client library; its public names are re-exported by `kvpool`."""

from kvpool.client.aio import AsyncClient, AsyncKeyspace, connect_async
from kvpool.client.client import Client, connect
from kvpool.client.keyspace import Keyspace
from kvpool.client.results import (
    ClientStats,
    DrainStatus,
    LoadResult,
    Match,
    NamespaceStatus,
    NodeStatus,
    PoolStatus,
    Reservation,
    SegmentStatus,
    StoreResult,
    TenantStatus,
    WriteResult,
)

__all__ = [
    "AsyncClient",
    "AsyncKeyspace",
    "Client",
    "ClientStats",
    "DrainStatus",
    "Keyspace",
    "LoadResult",
    "Match",
    "NamespaceStatus",
    "NodeStatus",
    "PoolStatus",
    "Reservation",
    "SegmentStatus",
    "StoreResult",
    "TenantStatus",
    "WriteResult",
    "connect",
    "connect_async",
]
