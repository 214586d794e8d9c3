"""gRPC servicers of the metadata service: they translate messages and decide nothing."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc
import msgspec

from kvpool.core.access import require_tenant
from kvpool.core.directory import NamespaceUsage
from kvpool.core.errors import ForbiddenError
from kvpool.core.keys import count_hashes, split_hashes
from kvpool.core.limits import EXPLAIN_BLOCKS_MAX, RESERVE_BLOCKS_MAX
from kvpool.core.namespace import parse_namespace
from kvpool.meta.explaining import BlockExplained, explain_blocks, find_target
from kvpool.meta.looking import block_message, find_block, namespace_usage
from kvpool.meta.moving import DrainProgress
from kvpool.meta.node_messages import nodes_message, topology_message
from kvpool.meta.quotas import limits_named, tenant_message
from kvpool.meta.serving import Serving
from kvpool.meta.using import Uses
from kvpool.ops.audit import Audit, shown_block
from kvpool.ops.identity import principal_of
from kvpool.transport.wire.messages import unpack
from kvpool.v1 import admin_pb2, admin_pb2_grpc, directory_pb2, directory_pb2_grpc


class DirectoryServicer(directory_pb2_grpc.DirectoryServicer):
    """`kvpool.v1.Directory`.

    Args:
        service: What answers.
        framed: URIs of the framed protocol, best first.
        version: Of the software.
        audit: Where it is told who opens and uses what.
    """

    def __init__(self, service: Serving, framed: list[str], version: str, audit: Audit | None = None) -> None:
        self._service = service
        self._audit = audit or Audit()
        self._uses = Uses(service, self._audit)
        self._framed = framed
        self._version = version

    def GetPool(
        self, request: directory_pb2.GetPoolRequest, context: grpc.ServicerContext
    ) -> directory_pb2.GetPoolResponse:
        return directory_pb2.GetPoolResponse(
            incarnation=self._service.incarnation,
            version=self._version,
            framed=self._framed,
            topology=nodes_message(self._service),
            tenant=principal_of(context).tenant or "",
        )

    def OpenNamespace(
        self, request: directory_pb2.OpenNamespaceRequest, context: grpc.ServicerContext
    ) -> directory_pb2.OpenNamespaceResponse:
        principal, namespace = principal_of(context), parse_namespace(request.document)
        try:
            require_tenant(principal, namespace.tenant)
        except ForbiddenError as error:
            self._audit.refused(principal, "OpenNamespace", error)
            raise
        namespace_id = self._service.open_namespace(request.document)
        shown = {"namespace": shown_block(namespace_id), "model": namespace.model, "of": namespace.tenant}
        self._audit.record("namespace_opened", principal, **shown)
        return directory_pb2.OpenNamespaceResponse(namespace=namespace_id)

    def DescribeNamespace(
        self, request: directory_pb2.DescribeNamespaceRequest, context: grpc.ServicerContext
    ) -> directory_pb2.DescribeNamespaceResponse:
        namespace = self._service.namespace(_visible(self._service, request.namespace, context))
        return directory_pb2.DescribeNamespaceResponse(document=namespace.document)

    def Match(self, request: directory_pb2.MatchRequest, context: grpc.ServicerContext) -> directory_pb2.MatchResponse:
        namespace = _visible(self._service, request.namespace, context)
        matched = self._service.match(namespace, request.hashes, request.first, request.lease_ms / 1000)
        return directory_pb2.MatchResponse(blocks=matched.blocks, reason=matched.reason or "", lease=matched.lease)

    def Release(
        self, request: directory_pb2.ReleaseRequest, context: grpc.ServicerContext
    ) -> directory_pb2.ReleaseResponse:
        released = self._service.release(request.lease, principal_of(context).tenant)
        return directory_pb2.ReleaseResponse(released=released)

    def Locate(
        self, request: directory_pb2.LocateRequest, context: grpc.ServicerContext
    ) -> directory_pb2.LocateResponse:
        shard = request.shard if request.HasField("shard") else None
        namespace = _visible(self._service, request.namespace, context)
        location = self._service.locate(namespace, request.hashes, request.first, shard)
        self._uses.located(principal_of(context), request.namespace, location.blocks)
        grants = self._service.reads.since(namespace, 0) if location.blocks else None
        return directory_pb2.LocateResponse(
            blocks=location.blocks,
            reason=location.reason or "",
            block=location.block.tolist(),
            shard=location.shard.tolist(),
            segment=location.segment.tolist(),
            slot=location.slot.tolist(),
            generation=location.generation.tolist(),
            checksum=location.checksum.tolist(),
            grants=[
                directory_pb2.NodeGrant(incarnation=node.incarnation, grant=node.grant)
                for node in (grants.nodes if grants is not None else ())
            ],
        )

    def Reserve(
        self, request: directory_pb2.ReserveRequest, context: grpc.ServicerContext
    ) -> directory_pb2.ReserveResponse:
        principal = principal_of(context)
        reserved = self._service.reserve(
            _visible(self._service, request.namespace, context),
            request.hashes,
            request.first,
            request.parent,
            principal.name,
            request.ttl_ms / 1000,
        )
        self._uses.reserved(principal, request.namespace, reserved.result.wants)
        grants = [
            directory_pb2.SegmentGrant(
                segment=grant.segment,
                block=unpack("blocks", grant.blocks, "<u4", len(grant.blocks) // 4).tolist(),
                shard=grant.shard,
                grant=grant.grant,
            )
            for grant in reserved.grants
        ]
        return directory_pb2.ReserveResponse(
            reservation=reserved.result.reservation,
            wants=reserved.result.wants,
            missing_from=reserved.result.missing_from,
            grants=grants,
        )

    def Abort(self, request: directory_pb2.AbortRequest, context: grpc.ServicerContext) -> directory_pb2.AbortResponse:
        hashes = None
        if request.hashes:
            count_hashes(request.hashes, RESERVE_BLOCKS_MAX)
            hashes = split_hashes(request.hashes)
        tenant = principal_of(context).tenant
        blocks = self._service.abort(request.reservation, hashes, crowded=request.crowded, tenant=tenant)
        return directory_pb2.AbortResponse(blocks=blocks)

    def ReportBad(
        self, request: directory_pb2.ReportBadRequest, context: grpc.ServicerContext
    ) -> directory_pb2.ReportBadResponse:
        count_hashes(request.hash, 1)
        namespace = _visible(self._service, request.namespace, context)
        where = (request.segment_id, request.slot, request.generation)
        dropped = self._service.report_bad(namespace, request.hash, *where)
        if dropped:
            self._uses.dropped(principal_of(context))
        return directory_pb2.ReportBadResponse(dropped=dropped)


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """`kvpool.v1.Admin`.

    Args:
        service: What answers.
        version: Of the software.
        refusals: Counts of what was refused for want of capacity, and of callers, by name.
        security: How the service is guarded.
        events: Where it publishes events: the stream, and replays and snapshots.
        audit: Where it is told who changes what.
    """

    def __init__(
        self,
        service: Serving,
        version: str,
        refusals: Callable[[], dict[str, int]],
        security: str = "",
        events: Sequence[str] = (),
        audit: Audit | None = None,
    ) -> None:
        self._audit = audit or Audit()
        self._security = security
        self._events = events
        self._service = service
        self._version = version
        self._refusals = refusals

    def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        status, tenant = self._service.status(), principal_of(context).tenant
        misses = self._service.ask(lambda directory, _: directory.lookup_stats().misses)
        shared = status.state if tenant is None else None
        return admin_pb2.GetStatusResponse(
            incarnation=status.incarnation,
            version=self._version,
            security=self._security,
            events=self._events,
            topology=topology_message(status, whole=tenant is None),
            namespaces=[
                _namespace(usage)
                for usage in namespace_usage(self._service)
                if tenant in (None, usage.namespace.tenant)
            ],
            # Counts are of all tenants' blocks and calls together: what moves them says what others do.
            counters=dataclasses.asdict(status.stats) | self._refusals() if tenant is None else {},
            state=None if shared is None else admin_pb2.SharedState(**dataclasses.asdict(shared.health)),
            servers=[
                admin_pb2.Server(**msgspec.structs.asdict(server)) for server in (shared.servers if shared else ())
            ],
            recovery=admin_pb2.Recovery(
                active=status.recovery.active,
                nodes_reported=status.recovery.reported_nodes,
                nodes_expected=status.recovery.expected_nodes,
                lasted_s=status.recovery.lasted_s,
            ),
            tenants=[
                tenant_message(stats, alone=tenant is not None)
                for stats in status.tenants
                if tenant in (None, stats.name)
            ],
            uptime_s=status.uptime_s,
            unix_time_s=time.time(),  # noqa: TID251 - told, not measured with
            misses={str(reason): count for reason, count in misses.items()} if tenant is None else {},
        )

    def Explain(self, request: admin_pb2.ExplainRequest, context: grpc.ServicerContext) -> admin_pb2.ExplainResponse:
        count_hashes(request.hashes, EXPLAIN_BLOCKS_MAX)
        wanted = parse_namespace(request.document) if request.document else None
        tenant = principal_of(context).tenant
        target = find_target(self._service, request.namespace, wanted, request.model, tenant)
        explained = explain_blocks(self._service, target, split_hashes(request.hashes))
        return admin_pb2.ExplainResponse(
            blocks=[_explanation(block) for block in explained.blocks],
            memory_full=explained.memory.full,
            memory_s=explained.memory.since_s,
            uptime_s=explained.uptime_s,
            joining=explained.joining,
        )

    def GetBlock(self, request: admin_pb2.GetBlockRequest, context: grpc.ServicerContext) -> admin_pb2.GetBlockResponse:
        count_hashes(request.hash, 1)
        wanted = parse_namespace(request.document) if request.document else None
        tenant = principal_of(context).tenant
        target = find_target(self._service, request.namespace, wanted, request.model, tenant)
        blocks = self._service.ask(partial(find_block, target.namespaces, request.hash))
        return admin_pb2.GetBlockResponse(blocks=map(block_message, blocks))

    def Pin(self, request: admin_pb2.PinRequest, context: grpc.ServicerContext) -> admin_pb2.PinResponse:
        count_hashes(request.hash, 1)
        ttl_s = request.ttl_ms / 1000 if request.HasField("ttl_ms") else None
        namespace = _visible(self._service, request.namespace, context)
        pinned = self._service.pin(namespace, request.hash, ttl_s)
        self._audit_pin("pinned", request, context, done=pinned)
        return admin_pb2.PinResponse(pinned=pinned)

    def Unpin(self, request: admin_pb2.UnpinRequest, context: grpc.ServicerContext) -> admin_pb2.UnpinResponse:
        count_hashes(request.hash, 1)
        namespace = _visible(self._service, request.namespace, context)
        unpinned = self._service.unpin(namespace, request.hash)
        self._audit_pin("unpinned", request, context, done=unpinned)
        return admin_pb2.UnpinResponse(unpinned=unpinned)

    def _audit_pin(
        self,
        action: str,
        request: admin_pb2.PinRequest | admin_pb2.UnpinRequest,
        context: grpc.ServicerContext,
        *,
        done: bool,
    ) -> None:
        shown = {"namespace": shown_block(request.namespace), "block": shown_block(request.hash), "done": done}
        self._audit.record(action, principal_of(context), **shown)

    def Drain(self, request: admin_pb2.DrainNodeRequest, context: grpc.ServicerContext) -> admin_pb2.DrainStatus:
        progress = self._service.mover.drain(request.node_id, request.timeout_ms / 1000, stay=request.stay)
        self._audit.record("drain", principal_of(context), node=request.node_id, stay=request.stay)
        return _drain_status(progress)

    def GetDrain(self, request: admin_pb2.GetDrainRequest, context: grpc.ServicerContext) -> admin_pb2.DrainStatus:
        return _drain_status(self._service.mover.progress(request.node_id))

    def CancelDrain(
        self, request: admin_pb2.CancelDrainRequest, context: grpc.ServicerContext
    ) -> admin_pb2.DrainStatus:
        progress = self._service.mover.cancel(request.node_id)
        self._audit.record("drain_cancelled", principal_of(context), node=request.node_id)
        return _drain_status(progress)

    def SetQuota(self, request: admin_pb2.SetQuotaRequest, context: grpc.ServicerContext) -> admin_pb2.TenantStatus:
        limits = limits_named(request)
        changed = self._service.quotas.change(request.tenant, limits, request.unlimited)
        shown = {"of": request.tenant, "limits": limits, "unlimited": list(request.unlimited)}
        self._audit.record("quota_changed", principal_of(context), **shown)
        return tenant_message(changed)


def _visible(service: Serving, namespace_id: bytes, context: grpc.ServicerContext) -> bytes:
    """See `MetaService.visible`."""
    return service.visible(namespace_id, principal_of(context).tenant)


def _namespace(usage: NamespaceUsage) -> admin_pb2.NamespaceStatus:
    namespace = usage.namespace
    return admin_pb2.NamespaceStatus(
        namespace=namespace.id,
        document=namespace.document,
        blocks=usage.blocks,
        size_bytes=usage.size_bytes,
        asked_blocks=usage.asked_blocks,
        matched_blocks=usage.matched_blocks,
        read_bytes=usage.read_bytes,
        stored_bytes=usage.stored_bytes,
    )


def _drain_status(progress: DrainProgress) -> admin_pb2.DrainStatus:
    return admin_pb2.DrainStatus(
        node_id=progress.node_id,
        state=progress.state,
        blocks=progress.blocks,
        bytes=progress.size_bytes,
        left_blocks=progress.left_blocks,
        left_bytes=progress.left_bytes,
        reason=progress.reason,
    )


def _explanation(block: BlockExplained) -> admin_pb2.BlockExplanation:
    why = block.explanation
    return admin_pb2.BlockExplanation(
        reason=why.reason or "",
        namespace=block.namespace,
        cause=why.cause or "",
        nodes=why.nodes,
        ago_s=why.ago_s,
        idle_s=why.idle_s,
        fill=why.fill,
        owner=why.owner,
        deadline_s=why.deadline_s,
        missing=why.missing,
        missing_reason=why.missing_reason or "",
        elsewhere=[admin_pb2.Elsewhere(namespace=n, differences=fields) for n, fields in block.elsewhere],
    )
