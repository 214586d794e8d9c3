"""kvpool: a distributed pool for the KV-cache blocks of LLM engines, keyed by chained block hashes.

pool = kvpool.connect("grpc://127.0.0.1:7300")
blocks = pool.namespace(kvpool.Namespace(model="llama", block_tokens=16, block_bytes=65536))
blocks.store(hashes, buffers)
matched = blocks.match(hashes).blocks
blocks.load(hashes, buffers[:matched])
"""

from kvpool.client import (
    AsyncClient,
    AsyncKeyspace,
    Client,
    ClientStats,
    DrainStatus,
    Keyspace,
    LoadResult,
    Match,
    NodeStatus,
    PoolStatus,
    Reservation,
    SegmentStatus,
    StoreResult,
    TenantStatus,
    WriteResult,
    connect,
    connect_async,
)
from kvpool.core.directory import MissReason, Want
from kvpool.core.errors import (
    AuthenticationError,
    CapacityError,
    ClosedError,
    DeadlineError,
    ForbiddenError,
    InvalidBufferError,
    InvalidHashError,
    InvalidNamespaceError,
    KvpoolError,
    NamespaceMismatchError,
    OverloadedError,
    ProtocolError,
    QuotaError,
    SettingsError,
    StaleGrantError,
    UnavailableError,
    UnknownNamespaceError,
    UsageError,
)
from kvpool.core.keys import chain_hashes
from kvpool.core.namespace import FieldDifference, Namespace
from kvpool.ops.settings import TlsSettings
from kvpool.ops.version import __version__

__all__ = [
    "AsyncClient",
    "AsyncKeyspace",
    "AuthenticationError",
    "CapacityError",
    "Client",
    "ClientStats",
    "ClosedError",
    "DeadlineError",
    "DrainStatus",
    "FieldDifference",
    "ForbiddenError",
    "InvalidBufferError",
    "InvalidHashError",
    "InvalidNamespaceError",
    "Keyspace",
    "KvpoolError",
    "LoadResult",
    "Match",
    "MissReason",
    "Namespace",
    "NamespaceMismatchError",
    "NodeStatus",
    "OverloadedError",
    "PoolStatus",
    "ProtocolError",
    "QuotaError",
    "Reservation",
    "SegmentStatus",
    "SettingsError",
    "StaleGrantError",
    "StoreResult",
    "TenantStatus",
    "TlsSettings",
    "UnavailableError",
    "UnknownNamespaceError",
    "UsageError",
    "Want",
    "WriteResult",
    "__version__",
    "chain_hashes",
    "connect",
    "connect_async",
]
