"""What a metadata service asks of the directory that it keeps, wherever that lies.

`kvpool.core.directory.Directory` is one such store, and the reference: what its methods promise, the others keep too.
Calls are batches with packed columns. Copies between nodes (replicas, disks, drains) are not part of it: only the
directory in memory makes those.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import (
    BlockView,
    CommitStatus,
    DirectoryStats,
    Explanation,
    Inventory,
    Location,
    LookupStats,
    Match,
    Memory,
    MissReason,
    NamespaceUsage,
    Order,
    ReserveResult,
    Segment,
    TenantStats,
)
from kvpool.core.directory.writing import Committed
from kvpool.core.namespace import Namespace


class Looking(Protocol):
    """See `kvpool.core.directory.viewing.View`."""

    def block(self, namespace_id: bytes, block_hash: bytes) -> BlockView | None: ...  # noqa: D102
    def usage(self, begin: int = ..., most: int = ...) -> list[NamespaceUsage]: ...  # noqa: D102


class Store(Protocol):
    """See `kvpool.core.directory.Directory`, method by method.

    Every method may raise UnavailableError where the store is not in this process.
    """

    @property
    def view(self) -> Looking: ...  # noqa: D102

    def open_namespace(self, namespace: Namespace) -> None: ...  # noqa: D102
    def namespaces(self) -> list[Namespace]: ...  # noqa: D102
    def namespace(self, namespace_id: bytes) -> Namespace: ...  # noqa: D102
    def knows(self, namespace_id: bytes) -> bool: ...  # noqa: D102
    def tenants(self) -> list[TenantStats]: ...  # noqa: D102

    def add_segment(self, segment_id: bytes, node_id: str, capacity_bytes: int, medium: str = ...) -> int: ...  # noqa: D102
    def lose_segment(self, segment_id: bytes) -> int: ...  # noqa: D102
    def drop_lost(self, most: int = ...) -> int: ...  # noqa: D102
    def set_recovering(self, *, recovering: bool) -> None: ...  # noqa: D102
    def set_out_of_use(self, segment_id: bytes, size_bytes: int) -> None: ...  # noqa: D102
    def set_accepting(self, segment_id: bytes, *, accepting: bool) -> None: ...  # noqa: D102
    def segment(self, number: int) -> Segment: ...  # noqa: D102
    def segments(self) -> list[Segment]: ...  # noqa: D102
    def orders(self, node_id: str, after: int = 0, most: int = ...) -> list[Order]: ...  # noqa: D102
    def acknowledge(self, node_id: str, number: int) -> None: ...  # noqa: D102
    def announce(self, segment_id: bytes, namespace_id: bytes, blocks: Inventory) -> NDArray[np.bool_]: ...  # noqa: D102
    def gone(  # noqa: D102
        self, segment_id: bytes, namespace_id: bytes, block_hash: bytes, slot: int, generation: int, *, bad: bool = ...
    ) -> bool: ...
    def report_bad(  # noqa: D102
        self, segment_id: bytes, namespace_id: bytes, block_hash: bytes, slot: int, generation: int
    ) -> bool: ...

    def match(self, namespace_id: bytes, hashes: bytes, first: int = 0, lease_s: float = 0.0) -> Match: ...  # noqa: D102
    def release(self, lease: int) -> bool: ...  # noqa: D102
    def locate(self, namespace_id: bytes, hashes: bytes, first: int = 0, shard: int | None = None) -> Location: ...  # noqa: D102
    def explain(self, namespace_id: bytes, block_hash: bytes) -> MissReason | None: ...  # noqa: D102
    def explain_block(self, namespace_id: bytes, block_hash: bytes) -> Explanation: ...  # noqa: D102
    def memory(self) -> Memory: ...  # noqa: D102

    def reserve(  # noqa: D102
        self,
        namespace_id: bytes,
        hashes: bytes,
        first: int = 0,
        parent: bytes = ...,
        *,
        owner: str = ...,
        ttl_s: float = ...,
    ) -> ReserveResult: ...
    def commit(self, reservation: int, segment_id: bytes, written: list[Committed]) -> list[CommitStatus]: ...  # noqa: D102
    def abort(self, reservation: int, hashes: list[bytes] | None = None, *, crowded: bool = False) -> int: ...  # noqa: D102
    def expire(self) -> None: ...  # noqa: D102

    def pin(self, namespace_id: bytes, block_hash: bytes, ttl_s: float | None = None) -> bool: ...  # noqa: D102
    def unpin(self, namespace_id: bytes, block_hash: bytes) -> bool: ...  # noqa: D102
    def stats(self) -> DirectoryStats: ...  # noqa: D102
    def lookup_stats(self) -> LookupStats: ...  # noqa: D102
