"""The node's data plane: one session for each framed connection, over TCP or the Unix socket."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import FETCHED
from kvpool.core.errors import ForbiddenError, ProtocolError, UsageError
from kvpool.core.limits import BLOCK_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from kvpool.core.principals import Principal
from kvpool.node.arriving import commit_arrived, named_slots, written_slots
from kvpool.node.guarding import Guard
from kvpool.node.meter import NodeMeter
from kvpool.node.pulling import Pulling
from kvpool.node.records import Receiving
from kvpool.node.segment import VramSegment
from kvpool.node.store import NodeStore
from kvpool.ops.failpoints import failpoint
from kvpool.transport.copying import checksum
from kvpool.transport.cuda import MapReply, MapRequest
from kvpool.transport.devices import parse_device
from kvpool.transport.ucx.process import UcxProcess
from kvpool.transport.wire.messages import (
    NOT_ALLOWED,
    NOT_MAPPED,
    AttachReply,
    AttachRequest,
    CommitSlotsRequest,
    DiscardRequest,
    Done,
    Message,
    Ping,
    PrepareReply,
    PrepareRequest,
    ReadReply,
    ReadRequest,
    Statuses,
    WriteRequest,
    unpack,
)
from kvpool.transport.wire.payload import Payload
from kvpool.transport.wire.server import Reply


class DataSession:
    """Serves one connection. The slots it prepares are its own, and go when it does.

    Args:
        store: What to serve.
        owner: The connection's number: the owner of its slots.
        local: Whether the peer is on this host, so that file descriptors can be passed to it.
        ucx: The node's UCX process, if it has one.
        meter: Where to count; by default where nobody looks.
        guard: What is asked of readers; by default nothing.
    """

    def __init__(
        self,
        store: NodeStore,
        owner: int,
        local: bool,
        ucx: UcxProcess | None = None,
        meter: NodeMeter | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._store = store
        self._guard = guard or Guard(store, needs_grants=False)
        self._meter = meter or NodeMeter()
        self._way = "unix" if local else "tcp"
        self._owner = owner
        self._local = local
        self._handlers: dict[type[Message], Callable[[Any, Payload], Reply]] = {
            ReadRequest: self._read,
            WriteRequest: self._write,
            PrepareRequest: self._prepare,
            CommitSlotsRequest: self._commit_slots,
            DiscardRequest: self._discard,
            AttachRequest: self._attach,
            MapRequest: self._map,
            Ping: self._ping,
        }
        self._pulling = None if ucx is None else Pulling(store, ucx, owner, self._guard)
        if self._pulling is not None:
            self._handlers |= self._pulling.handlers

    def greet(self, principal: Principal) -> None:
        """See `Session.greet`; reads and writes are bound by grants and generations, not by names."""

    def handle(self, request: Message, payload: Payload) -> Reply:
        """See `Session.handle`."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"{type(request).__name__} is not for a store node")
        began_s = time.perf_counter()
        reply = handler(request, payload)
        sent_bytes = sum(map(len, reply.payload))
        self._meter.served(request, time.perf_counter() - began_s, self._way, payload.size_bytes, sent_bytes)
        return reply

    def closed(self) -> None:
        """See `Session.closed`."""
        self._store.drop_owner(self._owner)
        if self._pulling is not None:
            self._pulling.closed()

    def _read(self, request: ReadRequest, payload: Payload) -> Reply:
        namespace = self._guard.namespace(request.grant)
        store = self._store.of(request.segment_id)
        slots, generations = named_slots(request.slots, request.generations)
        length = request.block_bytes
        if not 1 <= length <= BLOCK_BYTES_MAX or length * len(slots) > FRAME_PAYLOAD_BYTES_MAX:
            raise ProtocolError(f"a read of {len(slots)} blocks of {length} bytes is over the frame's limit")
        until_sent = ExitStack()
        found = until_sent.enter_context(store.read(slots.tolist(), generations.tolist(), length, namespace))
        return Reply(ReadReply(bytes(found.present)), found.views, sent=until_sent.close)

    def _write(self, request: WriteRequest, payload: Payload) -> Reply:
        slots, generations, checksums = written = written_slots(request)
        length, rest = divmod(payload.size_bytes, len(slots))
        if rest:
            raise ProtocolError(f"a payload of {payload.size_bytes} bytes is not {len(slots)} equal blocks")
        self._store.check_segment(request.segment_id)
        arrived = self._receive(self._store.begin_receive(slots, generations, self._owner), checksums, length, payload)
        return commit_arrived(self._store, request, self._owner, written, arrived)

    def _receive(
        self, places: list[Receiving | None], checksums: NDArray[np.uint64], length: int, payload: Payload
    ) -> NDArray[np.bool_]:
        """Receive each block into its place; False where other bytes arrived than the writer sent."""
        arrived = np.zeros(len(places), np.bool_)
        try:
            for i, (place, wanted) in enumerate(zip(places, checksums.tolist(), strict=True)):
                if place is None:
                    payload.skip(length)
                elif len(place.view) != length:
                    raise ProtocolError(f"a slot was prepared for {len(place.view)} bytes, not {length}")
                else:
                    payload.receive_into(place.view)
                failpoint("node.put.mid_bytes")
                arrived[i] = place is None or checksum([place.view], place.seed) == wanted
        finally:
            self._store.end_receive([(p, bool(a)) for p, a in zip(places, arrived, strict=True) if p is not None])
        return arrived

    def _prepare(self, request: PrepareRequest, payload: Payload) -> Reply:
        slots, generations = self._store.prepare(request.grant, self._owner)
        return Reply(PrepareReply(slots.tobytes(), generations.tobytes()))

    def _commit_slots(self, request: CommitSlotsRequest, payload: Payload) -> Reply:
        count = len(request.slots) // 4
        statuses = self._store.commit_slots(
            request.segment_id,
            request.reservation,
            self._owner,
            unpack("slots", request.slots, "<u4", count),
            unpack("generations", request.generations, "<u8", count),
            unpack("checksums", request.checksums, "<u8", count),
        )
        return Reply(Statuses(statuses))

    def _discard(self, request: DiscardRequest, payload: Payload) -> Reply:
        self._store.check_segment(request.segment_id)
        slots, generations = named_slots(request.slots, request.generations)
        return Reply(Done(self._store.discard(slots.tolist(), generations.tolist(), self._owner)))

    def _attach(self, request: AttachRequest, payload: Payload) -> Reply:
        segment = self._store.of(request.segment_id).segment
        if segment.medium in FETCHED:
            return Reply(AttachReply(NOT_MAPPED))
        if not self._local:
            raise UsageError("shared memory can be attached over the node's Unix socket only")
        if not self._guard.may_map(request.grant):
            return Reply(AttachReply(NOT_ALLOWED))
        return Reply(AttachReply(segment.size_bytes), descriptors=segment.descriptors())

    def _map(self, request: MapRequest, payload: Payload) -> Reply:
        segment = self._store.segment
        if not isinstance(segment, VramSegment):
            raise UsageError("this node has no GPU memory to map; use shm")
        if not self._local:
            raise UsageError("GPU memory can be mapped over the node's Unix socket only")
        if not self._guard.may_map_unasked():
            raise ForbiddenError("this node's memory may not be mapped by everybody (node.mapping); use unix or tcp")
        kind, _ = parse_device(segment.memory.name)
        return Reply(MapReply(segment.segment_id, kind, segment.memory.handle, segment.size_bytes))

    def _ping(self, request: Ping, payload: Payload) -> Reply:
        return Reply(Done(0))
