"""Targets that are whole services: what comes over a socket or in a gRPC call, to the real sessions and servicers."""

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http import HTTPStatus

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from prometheus_client import CollectorRegistry

from kvpool.core.errors import KvpoolError
from kvpool.core.grants import Grant, seal
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, PAGE_BYTES
from kvpool.core.principals import anyone
from kvpool.meta.framed import MetaSession
from kvpool.meta.membership import MembershipServicer, _Stream
from kvpool.node.serving import DataSession
from kvpool.ops.http import _Handler, _Server, role_pages
from kvpool.transport.ucx.helper import _Session as UcxSession
from kvpool.transport.ucx.messages import Region
from kvpool.transport.ucx.nixl import _check_pages
from kvpool.transport.wire.frame import HEADER_BYTES, Header, pack_header, parse_header
from kvpool.transport.wire.framed import FramedSocket
from kvpool.transport.wire.messages import (
    KINDS,
    PROTOCOL_VERSION,
    AttachRequest,
    CommitSlotsRequest,
    DiscardRequest,
    Hello,
    LocateRequest,
    MatchRequest,
    Message,
    Ping,
    PrepareRequest,
    ReadRequest,
    ReserveRequest,
    WriteRequest,
    decode,
    encode,
    pack,
)
from kvpool.transport.wire.server import FramedServer, Identity, Session
from kvpool.v1 import membership_pb2
from tests.fuzz.decoders import examples
from tests.fuzz.target import target
from tests.property.hostile_values import HASHES, NAMESPACE, RESERVED, SEGMENTS
from tests.property.test_hostile import Pool
from tests.property.test_hostile_grpc import METHODS, SERVICERS, Context
from tests.property.test_hostile_node import KEY, SOUND, Node

REPLY_BYTES_MAX = 1 << 26
CHAIN = b"".join(HASHES[:2])


def frame(message: Message, payload: bytes = b"") -> bytes:
    body = encode(message)
    return pack_header(Header(message.kind, 1, 1000, len(body), len(payload))) + body + payload


GREETING = frame(Hello(PROTOCOL_VERSION, "fuzzer"))


def converse(session: Session, said: bytes) -> None:
    """Say all of it on one connection to ``session``, and hang up; what is answered must be frames."""
    server = FramedServer(Identity("fuzzed", 1), lambda number, local: session, 4)
    near, far = socket.socketpair()
    answered = bytearray()

    def listen() -> None:
        with suppress(ConnectionResetError):  # closed with something unread
            while data := far.recv(1 << 16):
                answered.extend(data)
                assert len(answered) < REPLY_BYTES_MAX

    with far:
        listener = threading.Thread(target=listen)
        listener.start()
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        server._connections[1] = framed = FramedSocket(near)
        server._serve(1, framed)
        near.close()
        listener.join()
    check_frames(memoryview(answered))


def check_frames(answered: memoryview) -> None:
    while len(answered) >= HEADER_BYTES:
        header = parse_header(answered[:HEADER_BYTES])
        body = answered[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        if len(body) == header.body_bytes:  # the last one may be cut off by the end of the connection
            decode(header.kind, body)
        answered = answered[HEADER_BYTES + header.body_bytes + header.payload_bytes :]


def dialogues() -> list[bytes]:
    """A greeting, and one call of each kind that a metadata service knows; and a store."""
    calls = [KINDS[int.from_bytes(data[:2], "little")] for data in examples()]
    plain = {kind: decode(kind.kind, data[2:]) for kind, data in zip(calls, examples(), strict=True)}
    asked = [message for kind, message in plain.items() if kind.kind % 2 == 0 and kind.kind < 30]
    usual = [
        MatchRequest(NAMESPACE.id, CHAIN, 0, 1000),
        LocateRequest(NAMESPACE.id, CHAIN, 0, -1, 0),
        ReserveRequest(NAMESPACE.id, b"".join(HASHES), 2, b"", 1000, 0),
    ]
    return [GREETING + frame(message) for message in [*asked, *usual]] + [GREETING + b"".join(map(frame, usual))]


@target(dialogues, growth_bytes_max=FRAME_BODY_BYTES_MAX + (1 << 20))
def framed_meta(data: bytes) -> None:
    pool = Pool()
    converse(MetaSession(pool.service), data)
    pool.check()


def transfers() -> list[bytes]:
    """A greeting, and what a writer and a reader of the node of `test_hostile_node` say."""
    grant = seal(Grant(**SOUND), KEY)
    fresh, generations, checksums = pack((4, 5), "<u4"), pack((5, 6), "<u8"), pack((9, 9), "<u8")
    slots = (pack((0, 1), "<u4"), pack((1, 2), "<u8"))
    usual = [
        frame(Ping()),
        frame(PrepareRequest(grant)),
        frame(CommitSlotsRequest(SEGMENTS[0], RESERVED, *slots, checksums)),
        frame(WriteRequest(SEGMENTS[0], RESERVED, fresh, generations, checksums), bytes(2 * PAGE_BYTES)),
        frame(ReadRequest(SEGMENTS[0], pack((2, 3), "<u4"), pack((3, 4), "<u8"), PAGE_BYTES)),
        frame(DiscardRequest(SEGMENTS[0], *slots)),
        frame(AttachRequest(SEGMENTS[0])),
    ]
    return [GREETING + call for call in usual] + [GREETING + b"".join(usual)]


@target(transfers, growth_bytes_max=FRAME_BODY_BYTES_MAX + (1 << 20))
def framed_node(data: bytes) -> None:
    way, said = data[-1:], data[:-1]
    with ExitStack() as stack:
        node = Node(stack)
        converse(DataSession(node.store, owner=0, local=way == b"\0"), said)
        node.check()
        node.sessions[1].closed()


class Regions:
    """What a UCX process has without UCX: its region, and the same checks of what it is asked to read."""

    region = Region(b"agent", 4096, 16 * PAGE_BYTES)

    def add_peer(self, region: Region) -> int:
        return 1

    def forget_peer(self, number: int) -> None:
        assert isinstance(number, int)

    def read(self, number: int, pages_each: int, ours: np.ndarray, theirs: np.ndarray) -> None:
        for pages in (ours, theirs):
            _check_pages(pages, pages_each, self.region.size_bytes)
            assert int(pages.max()) + pages_each <= 16
            assert len(pages) == len(ours)


class Silent:
    def carrier(self) -> str:
        return ""


def of_kinds(first: int) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        kinds = [(int.from_bytes(data[:2], "little"), data[2:]) for data in examples()]
        bodies = [(kind, body) for kind, body in kinds if kind >= first and kind % 2 == 0]
        return [GREETING + frame(decode(kind, body)) for kind, body in bodies]

    return seeds


@target(of_kinds(50), growth_bytes_max=FRAME_BODY_BYTES_MAX + (1 << 20))
def framed_ucx(data: bytes) -> None:
    converse(UcxSession(Regions(), Silent()), data)


# gRPC


@target(lambda: [bytes([i]) + bytes(field) for i in range(len(METHODS)) for field in (b"", b"\x0a\x02n0")])
def grpc_calls(data: bytes) -> None:
    method = METHODS[data[0] % len(METHODS) if data else 0]
    request = GetMessageClass(method.input_type)()
    try:
        request.ParseFromString(data[1:])
    except DecodeError:
        return
    with ExitStack() as stack:
        servicer, check = SERVICERS[method.containing_service.name](stack)
        with suppress(KvpoolError):
            answer = getattr(servicer, method.name)(request, Context())
            assert answer.DESCRIPTOR is method.output_type
        check()


def streams() -> list[bytes]:
    """What a node says, each behind its length in two bytes."""
    hello = membership_pb2.NodeHello(node_id="n2", incarnation=9, protocol=PROTOCOL_VERSION)
    hello.segments.add(segment_id=b"2" * 16, medium="shm", capacity_bytes=6 * PAGE_BYTES)
    inventory = membership_pb2.Inventory(
        segment_id=b"2" * 16,
        document=NAMESPACE.document,
        hashes=CHAIN,
        parents=bytes(32) + HASHES[0],
        shards=bytes(4),
        slots=pack((0, 1), "<u4"),
        generations=pack((1, 2), "<u8"),
        checksums=pack((9, 9), "<u8"),
        ages_s=pack((1.0, 2.0), "<f4"),
    )
    said = [
        membership_pb2.FromNode(hello=hello),
        membership_pb2.FromNode(inventory=inventory),
        membership_pb2.FromNode(inventory_done={"orders_applied": 0}),
        membership_pb2.FromNode(heartbeat={"orders_applied": 1}),
        membership_pb2.FromNode(draining={}),
    ]
    parts = [event.SerializeToString() for event in said]
    return [b"".join(len(part).to_bytes(2, "little") + part for part in parts[:end]) for end in range(1, 6)]


@target(streams)
def grpc_control(data: bytes) -> None:
    pool, events = Pool(), []
    while len(data) > 2:
        length = int.from_bytes(data[:2], "little")
        with suppress(DecodeError):
            events.append(membership_pb2.FromNode.FromString(data[2 : 2 + length]))
        data = data[2 + length :]
    with suppress(KvpoolError):
        member = MembershipServicer(pool.service)._join(iter(events[:1]), anyone(""))
        pool.members.append(member)
        stream = _Stream(pool.service, member)
        for event in events[1:]:
            stream._take(event)
            pool.service.check_integrity()
    pool.check()


# HTTP

WORDS = [f"{status.value} {status.phrase}: ".encode() for status in HTTPStatus]
PAGES = role_pages(CollectorRegistry(), lambda: True, lambda: "not yet")
HTTP = _Server(("127.0.0.1", 0), PAGES, None)


@target(lambda: [f"GET {path} HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n".encode() for path in [*PAGES, "/"]])
def http_request(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        _Handler(near, ("127.0.0.1", 1), HTTP)
        near.shutdown(socket.SHUT_RDWR)
        answered = b"".join(iter(lambda: far.recv(1 << 16), b""))
    if answered:
        head, _, body = answered.partition(b"\r\n\r\n")
        ours = [page().body for page in PAGES.values()]
        assert head.startswith(b"HTTP/1.0 ")
        assert body in ours or any(body.startswith(words + b"GET one of ") for words in WORDS)
