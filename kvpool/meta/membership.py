"""The control stream of a node: its hello, inventory and heartbeats come in, its welcome and orders go out."""

import threading
from collections.abc import Iterator
from itertools import groupby

import grpc
import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import FetchBlocks, FreeSlot, Inventory, Order
from kvpool.core.errors import ForbiddenError, KvpoolError, ProtocolError, UnavailableError
from kvpool.core.keys import count_hashes, split_hashes
from kvpool.core.limits import (
    ANNOUNCE_BLOCKS_MAX,
    HASH_BYTES,
    RESERVE_BLOCKS_MAX,
    SEGMENT_ID_BYTES,
    SHARDS_MAX,
)
from kvpool.core.members import Member, MemberSegment, Scrub
from kvpool.core.principals import Principal, require_node
from kvpool.meta.service import ORDERS_PER_MESSAGE
from kvpool.meta.serving import Serving
from kvpool.ops.admission import Admission
from kvpool.ops.audit import Audit
from kvpool.ops.failpoints import failpoint
from kvpool.ops.grpc_server import code_of
from kvpool.ops.identity import principal_of
from kvpool.ops.logging import get_logger
from kvpool.transport.wire.messages import PROTOCOL_VERSION, unpack
from kvpool.v1 import membership_pb2, membership_pb2_grpc

ENDPOINTS_MAX = 16
SEGMENTS_PER_NODE_MAX = 64
NODE_ID_CHARS_MAX = 128
VERSION_CHARS_MAX = 64
INVENTORY_POLL_S = 0.02
"""How often a stream looks whether its node's inventory is complete; after that it waits for orders alone."""

ROOT_PARENT = bytes(HASH_BYTES)
"""Stands on the wire for the parent that a root does not have."""

log = get_logger(__name__)


class MembershipServicer(membership_pb2_grpc.MembershipServicer):
    """`kvpool.v1.Membership`.

    Args:
        service: What answers.
        audit: Where refusals are told.

    Attributes:
        nodes: Whose streams are let in; counts those which were not.
        refused_callers: Calls for a node that the caller was not.
    """

    def __init__(self, service: Serving, audit: Audit | None = None) -> None:
        self._service = service
        self._audit = audit or Audit()
        self.refused_callers = 0
        self.nodes = Admission("nodes", service.settings.nodes_max)

    def Control(
        self, request_iterator: Iterator[membership_pb2.FromNode], context: grpc.ServicerContext
    ) -> Iterator[membership_pb2.ToNode]:
        """One node's stream; when it ends, so does the node's session."""
        try:
            with self.nodes:
                yield from self._serve(request_iterator, context)
        except KvpoolError as error:
            self._note_forbidden(error, "Control", context)
            context.abort(code_of(error), str(error))

    def _note_forbidden(self, error: KvpoolError, call: str, context: grpc.ServicerContext) -> None:
        """A caller that spoke for a node that it is not is counted, and stands in the audit trail."""
        if isinstance(error, ForbiddenError):
            self.refused_callers += 1
            self._audit.refused(principal_of(context), call, error)

    def _serve(
        self, request_iterator: Iterator[membership_pb2.FromNode], context: grpc.ServicerContext
    ) -> Iterator[membership_pb2.ToNode]:
        member = self._join(request_iterator, principal_of(context))
        stream = _Stream(self._service, member)
        reader = threading.Thread(target=stream.read, args=(request_iterator,), name="kvpool-control", daemon=True)
        reader.start()
        try:
            yield stream.welcome()
            yield from stream.instructions(context)
        except UnavailableError as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            self._service.leave(member)

    def Commit(
        self, request: membership_pb2.CommitRequest, context: grpc.ServicerContext
    ) -> membership_pb2.CommitResponse:
        count = count_hashes(request.hashes, RESERVE_BLOCKS_MAX * SHARDS_MAX)
        columns = (request.shard, request.slot, request.generation, request.checksum)
        _check_columns(count, *[len(column) for column in columns])
        written = list(zip(split_hashes(request.hashes), *columns, strict=True))
        node_id = self._service.node_of(request.session)
        if node_id is not None:
            try:
                require_node(principal_of(context), node_id)
            except ForbiddenError as error:
                self._note_forbidden(error, "Commit", context)
                raise
        statuses = self._service.commit(request.session, request.segment_id, request.reservation, written)
        return membership_pb2.CommitResponse(statuses=bytes(statuses))

    def _join(self, requests: Iterator[membership_pb2.FromNode], principal: Principal) -> Member:
        first = next(requests, None)
        if first is None or first.WhichOneof("event") != "hello":
            raise ProtocolError("a control stream begins with NodeHello")
        hello = first.hello
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"node {hello.node_id!r} speaks version {hello.protocol}, this service {PROTOCOL_VERSION}: "
                "upgrade the older one"
            )
        require_node(principal, hello.node_id)
        segments = tuple(map(MemberSegment.of, hello.segments))
        if not 1 <= len(hello.node_id) <= NODE_ID_CHARS_MAX or len(hello.endpoints) > ENDPOINTS_MAX:
            raise ProtocolError(f"node id of {len(hello.node_id)} characters, {len(hello.endpoints)} endpoints")
        if len(segments) > SEGMENTS_PER_NODE_MAX or any(len(s.segment_id) != SEGMENT_ID_BYTES for s in segments):
            raise ProtocolError(f"segment ids have {SEGMENT_ID_BYTES} bytes; at most {SEGMENTS_PER_NODE_MAX} a node")
        endpoints, version = tuple(hello.endpoints), hello.version[:VERSION_CHARS_MAX]
        return self._service.join(hello.node_id, hello.incarnation, endpoints, segments, version)


class _Stream:
    """What one control stream has taken in and must still send."""

    def __init__(self, service: Serving, member: Member) -> None:
        self._service = service
        self._member = member
        self._sent = 0
        self._inventory_done = threading.Event()
        self._unwanted: list[FreeSlot] = []
        self._ended = False

    def welcome(self) -> membership_pb2.ToNode:
        return membership_pb2.ToNode(
            welcome=membership_pb2.NodeWelcome(
                incarnation=self._service.fence,
                session=self._member.session,
                grant_key=self._member.key,
                heartbeat_ms=int(self._service.settings.heartbeat_s * 1000),
                protocol=PROTOCOL_VERSION,
            )
        )

    def instructions(self, context: grpc.ServicerContext) -> Iterator[membership_pb2.ToNode]:
        """Orders as they come, and Ready once, until the stream ends."""
        ready_told = False
        while context.is_active() and not self._ended:
            if self._inventory_done.is_set() and not ready_told:
                ready_told = True
                for start in range(0, len(self._unwanted), ORDERS_PER_MESSAGE):
                    yield _free_slots(self._unwanted[start : start + ORDERS_PER_MESSAGE])
                self._service.ready(self._member)
                yield membership_pb2.ToNode(ready=membership_pb2.Ready())
            pause_s = self._service.settings.heartbeat_s if ready_told else INVENTORY_POLL_S
            orders = self._service.wait_for_orders(self._member, self._sent, pause_s)
            yield from self._in_order(orders)
            if self._member.mode != self._member.mode_told:
                self._member.mode_told = draining, leave = self._member.mode
                yield membership_pb2.ToNode(mode=membership_pb2.NodeMode(draining=draining, leave=leave))

    def _in_order(self, orders: list[Order]) -> Iterator[membership_pb2.ToNode]:
        """Orders as messages: what is to be freed before something is fetched comes before it."""
        for is_free, some in groupby(orders, key=lambda order: isinstance(order, FreeSlot)):
            if is_free:
                yield _free_slots([order for order in some if isinstance(order, FreeSlot)])
                continue
            for order in some:
                fetch = self._service.fetch(self._member, order.copy) if isinstance(order, FetchBlocks) else None
                fetch = fetch or membership_pb2.FetchBlocks()  # has ended: told all the same, to be acknowledged
                fetch.number = order.number
                yield membership_pb2.ToNode(fetch_blocks=fetch)
        if orders:
            self._sent = orders[-1].number

    def read(self, requests: Iterator[membership_pb2.FromNode]) -> None:
        """Take in what the node sends, until it stops or the session is over."""
        try:
            for request in requests:
                self._take(request)
        except grpc.RpcError:
            pass  # the stream broke: the session ends with it
        except KvpoolError as error:
            log.warning("control_stream_refused", node=self._member.node_id, error=str(error))
        finally:
            self._ended = True
            self._service.leave(self._member)

    def _take(self, request: membership_pb2.FromNode) -> None:
        event = request.WhichOneof("event")
        if event == "heartbeat":
            heartbeat = request.heartbeat
            moved = (heartbeat.fetched_bytes, heartbeat.moved_bytes)
            said = (Scrub.of(heartbeat.scrub), heartbeat.segments, *moved)
            self._service.heard(self._member, heartbeat.orders_applied, *said)
        elif event == "inventory":
            self._take_inventory(request.inventory)
        elif event == "inventory_done":
            self._service.heard(self._member, request.inventory_done.orders_applied)
            self._inventory_done.set()
        elif event == "draining":
            self._service.draining(self._member)
        else:
            raise ProtocolError(f"control stream event {event!r} is not expected here")

    def _take_inventory(self, message: membership_pb2.Inventory) -> None:
        part = _columns(message)
        failpoint("meta.inventory.before_take")
        wanted = self._service.take_inventory(self._member, message.segment_id, message.document, part)
        failpoint("meta.inventory.after_take")
        # A reader may hold a lease that an earlier service gave: these slots rest before they are used again.
        self._unwanted += [
            FreeSlot(0, message.segment_id, int(part.slots[i]), int(part.generations[i]), rest=True)
            for i in np.flatnonzero(~wanted).tolist()
        ]


def _columns(message: membership_pb2.Inventory) -> Inventory:
    """The part of an inventory in ``message``; raises ProtocolError for what it cannot be."""
    count = count_hashes(message.hashes, ANNOUNCE_BLOCKS_MAX)
    ages_s: NDArray[np.float32] = unpack("ages", message.ages_s, "<f4", count)
    if not (np.isfinite(ages_s).all() and (ages_s >= 0).all()):
        raise ProtocolError("an age that is no number of seconds")
    parents = split_hashes(message.parents)
    if len(parents) != count or len(parents[-1]) != len(ROOT_PARENT):
        raise ProtocolError(f"{len(message.parents)} bytes of parents for {count} hashes; give one each")
    return Inventory(
        split_hashes(message.hashes),
        [b"" if parent == ROOT_PARENT else parent for parent in parents],
        unpack("shards", message.shards, "<u2", count),
        unpack("slots", message.slots, "<u4", count),
        unpack("generations", message.generations, "<u8", count),
        unpack("checksums", message.checksums, "<u8", count),
        ages_s,
    )


def _free_slots(orders: list[FreeSlot]) -> membership_pb2.ToNode:
    return membership_pb2.ToNode(
        free_slots=membership_pb2.FreeSlots(
            number=[order.number for order in orders],
            segment_id=[order.segment_id for order in orders],
            slot=[order.slot for order in orders],
            generation=[order.generation for order in orders],
            rest=[order.rest for order in orders],
        )
    )


def _check_columns(count: int, *lengths: int) -> None:
    if any(length != count for length in lengths):
        raise ProtocolError(f"columns of {lengths} elements for {count} hashes; they must be equally long")
