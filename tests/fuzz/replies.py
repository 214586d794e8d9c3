"""Targets on the client's side: what a service or a node may answer. The client does as with a pool that is down."""

import contextlib
import socket
from collections.abc import Iterator
from functools import cache, partial

import numpy as np

from kvpool.client.client import Client
from kvpool.client.keyspace import Keyspace
from kvpool.core.errors import KvpoolError, ProtocolError, UnavailableError
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, PAGE_BYTES
from kvpool.transport.wire import connection
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import (
    KINDS,
    NONE_INDEX,
    PROTOCOL_VERSION,
    Done,
    LocateReply,
    MatchReply,
    Message,
    NodeInfo,
    ReadReply,
    ReserveReply,
    SegmentGrant,
    SegmentInfo,
    Topology,
    Welcome,
    decode,
    encode,
    pack,
)
from tests.fuzz.endpoints import frame
from tests.fuzz.target import target
from tests.property.hostile_values import HASHES, SMALL

BLOCKS = 3
CHAIN = HASHES[:BLOCKS]
NODE = NodeInfo("n0", 1, "ready", ["inproc://nobody"], [SegmentInfo(0, b"0" * 16, "shm", PAGE_BYTES)])


@cache
def keyspace() -> Keyspace:
    """Of a client whose nodes nobody can reach: what a service may name is not dialled here."""
    client = Client("grpc://127.0.0.1:1", ("inproc",), 1.0, 1, "fuzzed")
    return Keyspace(client, SMALL)


@contextlib.contextmanager
def answered_with(body: bytes) -> Iterator[Keyspace]:
    """The service answers every call with ``body``, as far as a connection lets that through."""
    found = keyspace()
    meta = found._client._meta

    def call(request: Message, reply_type: type[Message], deadline: object, *, again: bool) -> Message:
        if reply_type is Done:
            return Done(0)
        return decode(reply_type.kind, body)

    meta.call = call
    meta.topology = Topology(0, [])
    yield found


def match(body: bytes) -> None:
    with answered_with(body) as blocks:
        matched = blocks.match(CHAIN, lease_s=1)
        assert 0 <= matched.blocks <= BLOCKS
        blocks.release(matched)


def load(body: bytes) -> None:
    with answered_with(body) as blocks:
        loaded = blocks.load(CHAIN, np.zeros((BLOCKS, SMALL.block_bytes), np.uint8))
        assert loaded.loaded == 0
        assert len(loaded.reasons) == BLOCKS


def store(body: bytes) -> None:
    with answered_with(body) as blocks:
        assert blocks.store(CHAIN, np.zeros((BLOCKS, SMALL.block_bytes), np.uint8)).stored == 0


def reserve(body: bytes) -> None:
    with answered_with(body) as blocks, contextlib.suppress(UnavailableError, ProtocolError):
        blocks.reserve(CHAIN)


CALLS = (match, load, store, reserve)


def answers() -> list[bytes]:
    """What an honest service says, behind the number of the call that it answers."""
    topology, first = Topology(1, [NODE]), pack((0,), "<u4")
    column = pack((7,), "<u8")
    located = LocateReply(1, "cold", first, pack((0,), "<u2"), pack((0,), "<u2"), first, column, column, topology)
    reserved = ReserveReply(9, bytes([1, 1, 1]), NONE_INDEX, [SegmentGrant(0, 0, first, b"sealed")], topology)
    replies = [MatchReply(2, "cold", 5), located, reserved, reserved]
    return [bytes([i]) + encode(reply) for i, reply in enumerate(replies)]


@target(answers)
def metadata_answers(data: bytes) -> None:
    CALLS[data[0] % len(CALLS) if data else 0](data[1:])


def spoken() -> list[bytes]:
    greeting = frame(Welcome(PROTOCOL_VERSION, "n0", 1))
    answer = bytearray(frame(ReadReply(b"\1"), bytes(8)))
    answer[8] = 2  # the second call of the connection
    return [greeting + bytes(answer), greeting]


@target(spoken, growth_bytes_max=FRAME_BODY_BYTES_MAX + (1 << 20))
def server_speaks(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        dial = connection._dial
        connection._dial = lambda uri, timeout_s: near
        try:
            call(partial(Connection, "unix:///fuzzed", "fuzzed", 1.0))
        finally:
            connection._dial = dial


def call(open_connection: partial[Connection]) -> None:
    with contextlib.suppress(KvpoolError), contextlib.closing(open_connection()) as opened:
        opened.post(KINDS[ReadReply.kind - 1](b"0" * 16, bytes(4), bytes(8), 8), 1.0)
        _, payload_bytes = opened.begin(ReadReply, 1.0)
        if payload_bytes <= 1 << 16:
            opened.take([memoryview(bytearray(payload_bytes))])
