"""The hot calls over the framed protocol: one session for each connection of a client or a node."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from kvpool.core.errors import ProtocolError
from kvpool.core.keys import count_hashes, split_hashes
from kvpool.core.limits import RESERVE_BLOCKS_MAX, SHARDS_MAX
from kvpool.core.principals import Principal, anyone, require_node
from kvpool.meta.serving import Serving
from kvpool.meta.using import Uses
from kvpool.ops.audit import Audit
from kvpool.ops.failpoints import failpoint
from kvpool.ops.metrics import Latency, latencies
from kvpool.transport.wire.messages import (
    ALL_SHARDS,
    NONE_INDEX,
    AbortRequest,
    CommitRequest,
    Done,
    GoneRequest,
    LocateReply,
    LocateRequest,
    MatchReply,
    MatchRequest,
    Message,
    Ping,
    ReleaseRequest,
    ReportBadRequest,
    ReserveReply,
    ReserveRequest,
    Statuses,
    unpack,
)
from kvpool.transport.wire.payload import Payload
from kvpool.transport.wire.server import Reply

REQUESTS: dict[type[Message], str] = {
    MatchRequest: "match",
    ReleaseRequest: "release",
    LocateRequest: "locate",
    ReserveRequest: "reserve",
    CommitRequest: "commit",
    AbortRequest: "abort",
    ReportBadRequest: "report_bad",
    GoneRequest: "gone",
    Ping: "ping",
}
"""What a service is asked over this protocol, as metrics call it."""


class MetaSession:
    """Serves one connection.

    Args:
        service: What answers.
        times: Where to count how long each of `REQUESTS` took; by default nowhere that anyone looks.
        uses: Where it is told who uses what; by default nowhere.
    """

    def __init__(self, service: Serving, times: Mapping[str, Latency] | None = None, uses: Uses | None = None) -> None:
        self._service = service
        self._uses = uses or Uses(service, Audit())
        self._principal = anyone("")
        self._own: set[bytes] = set()
        self._handlers: dict[type[Message], Callable[[Any], Message]] = {
            MatchRequest: self._match,
            ReleaseRequest: self._release,
            LocateRequest: self._locate,
            ReserveRequest: self._reserve,
            CommitRequest: self._commit,
            AbortRequest: self._abort,
            ReportBadRequest: self._report_bad,
            GoneRequest: self._gone,
            Ping: self._ping,
        }
        times = times or latencies(REQUESTS.values())
        self._took = {kind: times[step].observe for kind, step in REQUESTS.items()}

    def greet(self, principal: Principal) -> None:
        """See `Session.greet`."""
        self._principal = principal
        self._own.clear()

    def handle(self, request: Message, payload: Payload) -> Reply:
        """See `Session.handle`; block bytes are not for the metadata service."""
        handler = self._handlers.get(type(request))
        if handler is None or payload.size_bytes:
            raise ProtocolError(f"{type(request).__name__} with {payload.size_bytes} bytes is not for this service")
        began_s = perf_counter()
        answer = handler(request)
        self._took[type(request)](perf_counter() - began_s)
        return Reply(answer)

    def closed(self) -> None:
        """See `Session.closed`; reservations outlive a connection until their deadline."""

    def _match(self, request: MatchRequest) -> Message:
        matched = self._service.match(
            self._visible(request.namespace), request.hashes, request.first, _seconds(request.lease_ms)
        )
        failpoint("meta.match.before_answer")
        return MatchReply(matched.blocks, matched.reason or "", matched.lease)

    def _release(self, request: ReleaseRequest) -> Message:
        return Done(int(self._service.release(request.lease, self._principal.tenant)))

    def _locate(self, request: LocateRequest) -> Message:
        shard = None if request.shard == ALL_SHARDS else request.shard
        namespace = self._visible(request.namespace)
        location = self._service.locate(namespace, request.hashes, request.first, shard)
        self._uses.located(self._principal, request.namespace, location.blocks)
        failpoint("meta.locate.before_answer")
        return LocateReply(
            count=location.blocks,
            reason=location.reason or "",
            blocks=location.block.tobytes(),
            shards=location.shard.tobytes(),
            segments=location.segment.tobytes(),
            slots=location.slot.tobytes(),
            generations=location.generation.tobytes(),
            checksums=location.checksum.tobytes(),
            topology=self._service.topology(request.topology),
            grants=self._service.reads.since(namespace, request.grants) if location.blocks else None,
        )

    def _reserve(self, request: ReserveRequest) -> Message:
        reserved = self._service.reserve(
            self._visible(request.namespace),
            request.hashes,
            request.first,
            request.parent,
            self._principal.name,
            _seconds(request.ttl_ms),
        )
        failpoint("meta.reserve.before_answer")
        result = reserved.result
        self._uses.reserved(self._principal, request.namespace, result.wants)
        return ReserveReply(
            reservation=result.reservation,
            wants=result.wants,
            missing_from=NONE_INDEX if result.missing_from is None else result.missing_from,
            grants=reserved.grants,
            topology=self._service.topology(request.topology),
        )

    def _commit(self, request: CommitRequest) -> Message:
        count = count_hashes(request.hashes, RESERVE_BLOCKS_MAX * SHARDS_MAX)
        written = list(
            zip(
                split_hashes(request.hashes),
                unpack("shards", request.shards, "<u2", count).tolist(),
                unpack("slots", request.slots, "<u4", count).tolist(),
                unpack("generations", request.generations, "<u8", count).tolist(),
                unpack("checksums", request.checksums, "<u8", count).tolist(),
                strict=True,
            )
        )
        self._check_node(request.session)
        statuses = self._service.commit(request.session, request.segment_id, request.reservation, written)
        return Statuses(bytes(statuses))

    def _abort(self, request: AbortRequest) -> Message:
        hashes = None
        if request.hashes:
            count_hashes(request.hashes, RESERVE_BLOCKS_MAX)
            hashes = split_hashes(request.hashes)
        tenant = self._principal.tenant
        aborted = self._service.abort(request.reservation, hashes, crowded=request.crowded, tenant=tenant)
        failpoint("meta.abort.before_answer")
        return Done(aborted)

    def _report_bad(self, request: ReportBadRequest) -> Message:
        count_hashes(request.hash, 1)
        where = (request.segment_id, request.slot, request.generation)
        dropped = self._service.report_bad(self._visible(request.namespace), request.hash, *where)
        if dropped:
            self._uses.dropped(self._principal)
        return Done(int(dropped))

    def _gone(self, request: GoneRequest) -> Message:
        count = count_hashes(request.hashes, RESERVE_BLOCKS_MAX)
        slots = list(
            zip(
                split_hashes(request.hashes),
                unpack("slots", request.slots, "<u4", count).tolist(),
                unpack("generations", request.generations, "<u8", count).tolist(),
                strict=True,
            )
        )
        self._check_node(request.session)
        where = (request.session, request.segment_id, request.namespace)
        return Done(self._service.gone(*where, slots, bad=request.bad))

    def _visible(self, namespace_id: bytes) -> bytes:
        """See `MetaService.visible`; what was found to be the caller's own stays so, for an id is made of its owner."""
        tenant = self._principal.tenant
        if tenant is None or namespace_id in self._own:
            return namespace_id
        visible = self._service.visible(namespace_id, tenant)
        if visible == namespace_id:
            self._own.add(namespace_id)
        return visible

    def _check_node(self, session: int) -> None:
        """A node speaks for itself alone; of a session that is over nothing is taken anyway."""
        node_id = self._service.node_of(session)
        if node_id is not None:
            require_node(self._principal, node_id)

    def _ping(self, _request: Ping) -> Message:
        return Done(0)


def _seconds(milliseconds: int) -> float:
    if milliseconds < 0:
        raise ProtocolError(f"a time of {milliseconds} ms; it must not be negative")
    return milliseconds / 1000
