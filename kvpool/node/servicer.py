"""The gRPC `StoreNode` service: the same operations as the data plane, without bytes."""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import numpy as np

from kvpool.core.errors import ProtocolError
from kvpool.core.limits import RESERVE_BLOCKS_MAX
from kvpool.core.principals import Principal, Role
from kvpool.node.scrub import verify
from kvpool.node.store import NodeStore
from kvpool.ops.audit import Audit
from kvpool.ops.identity import principal_of
from kvpool.v1 import store_node_pb2, store_node_pb2_grpc

if TYPE_CHECKING:
    from kvpool.v1 import common_pb2

_WRITER_BIT = 1 << 64
"""Keeps the owners named over gRPC apart from connection numbers."""


class StoreNodeServicer(store_node_pb2_grpc.StoreNodeServicer):
    """`kvpool.v1.StoreNode`.

    Args:
        store: What it serves.
        describe: The node as others see it.
        connections: Open data plane connections.
        refusals: Counts of what was refused for want of capacity, by name.
        drain: Stops taking new blocks.
        audit: Where it is told who changes what.
    """

    def __init__(
        self,
        store: NodeStore,
        describe: "Callable[[], common_pb2.Node]",
        connections: Callable[[], int],
        refusals: Callable[[], dict[str, int]],
        drain: Callable[[], None],
        audit: Audit | None = None,
    ) -> None:
        self._audit = audit or Audit()
        self._store = store
        self._describe = describe
        self._connections = connections
        self._refusals = refusals
        self._drain = drain

    def Prepare(
        self, request: store_node_pb2.PrepareRequest, context: grpc.ServicerContext
    ) -> store_node_pb2.PrepareResponse:
        slots, generations = self._store.prepare(
            request.grant, owner_of(principal_of(context), request.writer), bound=False
        )
        return store_node_pb2.PrepareResponse(slot=slots.tolist(), generation=generations.tolist())

    def Commit(
        self, request: store_node_pb2.CommitSlotsRequest, context: grpc.ServicerContext
    ) -> store_node_pb2.CommitSlotsResponse:
        count = len(request.slot)
        if not count == len(request.generation) == len(request.checksum) or count > RESERVE_BLOCKS_MAX:
            raise ProtocolError(f"{count} slots with {len(request.generation)} generations; give one each")
        statuses = self._store.commit_slots(
            request.segment_id,
            request.reservation,
            owner_of(principal_of(context), request.writer),
            np.array(request.slot, np.uint32),
            np.array(request.generation, np.uint64),
            np.array(request.checksum, np.uint64),
        )
        return store_node_pb2.CommitSlotsResponse(statuses=statuses)

    def Abort(
        self, request: store_node_pb2.AbortSlotsRequest, context: grpc.ServicerContext
    ) -> store_node_pb2.AbortSlotsResponse:
        self._store.drop_owner(owner_of(principal_of(context), request.writer))
        return store_node_pb2.AbortSlotsResponse()

    def Stat(self, request: store_node_pb2.StatRequest, context: grpc.ServicerContext) -> store_node_pb2.StatResponse:
        stats = self._store.stats()
        disk = self._store.disk.stats().counters if self._store.disk is not None else {}
        return store_node_pb2.StatResponse(
            node=self._describe(),
            quarantined_bytes=stats.quarantined_bytes,
            largest_free_bytes=stats.largest_free_bytes,
            connections=self._connections(),
            counters=stats.counters | {f"disk_{name}": count for name, count in disk.items()} | self._refusals(),
        )

    def Verify(
        self, request: store_node_pb2.VerifyRequest, context: grpc.ServicerContext
    ) -> store_node_pb2.VerifyResponse:
        tiers = [store.checks for store in self._store.tiers]
        if not request.page:
            self._audit.record("verify", principal_of(context))
        checked, took_s = verify(tiers, request.page, request.limit_ms / 1000)
        return store_node_pb2.VerifyResponse(
            next_page=checked.next_page,
            pages=sum(checks.pages for checks in tiers),
            blocks=checked.blocks,
            bytes=checked.size_bytes,
            bad=checked.bad,
            took_us=int(took_s * 1e6),
        )

    def Drain(
        self, request: store_node_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> store_node_pb2.DrainResponse:
        self._drain()
        self._audit.record("node_drain", principal_of(context))
        return store_node_pb2.DrainResponse()


def owner_of(principal: Principal, writer: int) -> int:
    """Who owns what ``writer`` prepares over gRPC: its number is its own choice, so that who it is counts beside it."""
    if principal.roles == frozenset(Role):  # `anyone`, whose name is no more than where it calls from
        return _WRITER_BIT | writer
    named = repr((principal.tenant, principal.name, writer)).encode()
    return _WRITER_BIT | int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little")
