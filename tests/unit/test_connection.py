"""Framed connections between real sockets: deadlines, broken peers, stalled peers, and nothing left when they stop."""

import os
import select
import socket
import struct
import threading
import tracemalloc
from contextlib import contextmanager

import pytest

from kvpool.core import errors
from kvpool.core.errors import (
    CapacityError,
    ClosedError,
    DeadlineError,
    KvpoolError,
    ProtocolError,
    SettingsError,
    UnavailableError,
    UsageError,
)
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from kvpool.transport.pool import IDLE_MAX, ConnectionPool
from kvpool.transport.wire import server as server_module
from kvpool.transport.wire.connection import IOV_MAX, Connection, FramedSocket, split_address
from kvpool.transport.wire.frame import HEADER_BYTES, Header, pack_header
from kvpool.transport.wire.messages import (
    PROTOCOL_VERSION,
    AttachReply,
    AttachRequest,
    DiscardRequest,
    Done,
    ErrorReply,
    Hello,
    Ping,
    ReadReply,
    ReadRequest,
    Statuses,
    Welcome,
    WriteRequest,
    encode,
)
from kvpool.transport.wire.server import FramedServer, Identity, Reply

SOON_S = 0.05
"""A deadline that is meant to pass."""
LONG_S = 20.0
"""One that is not."""
INCARNATION = 7


class Scripted:
    """Serves one connection by the script of a test; what it is told is remembered."""

    def __init__(self, number, local):
        self.number, self.local = number, local
        self.principal = None
        self.received = b""
        self.ended = threading.Event()
        self.sent = threading.Event()

    def greet(self, principal):
        self.principal = principal

    def handle(self, request, payload):
        match request:
            case Ping():
                return Reply(Done(0))
            case ReadRequest(block_bytes=size_bytes):
                return Reply(ReadReply(b"\1"), [memoryview(bytes([7]) * size_bytes)], sent=self.sent.set)
            case WriteRequest():
                buffer = bytearray(payload.size_bytes)
                payload.receive_into(memoryview(buffer))
                self.received = bytes(buffer)
                return Reply(Statuses(b"\0"))
            case AttachRequest(segment_id=path):
                return self.attach(path)
            case DiscardRequest(segment_id=name):
                raise getattr(errors, name.decode())("as scripted")
        raise ProtocolError("not in the script")

    def attach(self, path):
        self.file = os.open(path, os.O_RDONLY)
        return Reply(AttachReply(2), descriptors=(self.file, self.file), sent=lambda: os.close(self.file))

    def closed(self):
        self.ended.set()


class Server(FramedServer):
    """A framed server and the sessions it has opened."""

    def __init__(self, connections_max=64):
        self.sessions = []
        super().__init__(Identity("scripted", INCARNATION), self.open, connections_max)

    def open(self, number, local):
        self.sessions.append(Scripted(number, local))
        return self.sessions[-1]


@contextmanager
def running(listen, **options):
    server = Server(**options)
    try:
        uri = listen(server)
        server.start()
        yield server, uri
    finally:
        server.stop()


@pytest.fixture(params=["tcp", "unix"])
def served(request, tmp_path):
    """A running server and its URI."""
    listen = {"tcp": lambda s: s.listen_tcp("127.0.0.1", 0), "unix": lambda s: s.listen_unix(tmp_path / "socket")}
    with running(listen[request.param]) as started:
        yield started


@pytest.fixture
def server(served):
    return served[0]


@pytest.fixture
def uri(served):
    return served[1]


@pytest.fixture
def connect(uri):
    """Opens connections that are closed after the test."""
    opened = []

    def connect(timeout_s=LONG_S):
        opened.append(Connection(uri, "me", timeout_s))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def connection(connect):
    return connect()


@contextmanager
def raw(uri):
    """A socket to a framed port, in the hands of the test."""
    scheme, _, rest = uri.partition("://")
    sock = socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET)
    with sock:
        sock.settimeout(LONG_S)
        sock.connect(rest if scheme == "unix" else split_address(rest))
        yield sock


def ping(connection, timeout_s=LONG_S):
    return connection.call(Ping(), Done, timeout_s)


def frame(message, correlation=1, payload=b"", **header):
    body = encode(message)
    fields = Header(message.kind, correlation, 0, len(body), len(payload))._replace(**header)
    return pack_header(fields) + body + payload


def until_closed(sock):
    """All that the peer sends until it closes."""
    received = b""
    try:
        while chunk := sock.recv(1 << 16):
            received += chunk
    except ConnectionResetError:
        pass
    return received


class Peer:
    """The far end of one connection, answering by hand on a thread of its own."""

    def __init__(self, tmp_path, answer):
        self.uri = f"unix://{tmp_path / 'peer'}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(tmp_path / "peer"))
        self._listener.listen()
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        sock, _ = self._listener.accept()
        with sock:
            sock.settimeout(LONG_S)
            self.read_frame(sock)
            sock.sendall(frame(Welcome(PROTOCOL_VERSION, "peer", INCARNATION)))
            self._answer(self, sock)

    def read_frame(self, sock):
        header = sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
        body_bytes = struct.unpack_from("<I", header, 16)[0] if header else 0
        return header + sock.recv(body_bytes, socket.MSG_WAITALL)

    def close(self):
        self._thread.join()
        self._listener.close()


@pytest.fixture
def peer(tmp_path):
    """Starts a peer that greets, then does what the test says with its socket."""
    peers = []

    def start(answer):
        peers.append(Peer(tmp_path, answer))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


# Calls


def test_a_call_is_answered_and_the_peer_is_who_it_says(connection, server):
    assert ping(connection) == Done(0)
    assert connection.welcome == Welcome(PROTOCOL_VERSION, "scripted", INCARNATION)
    assert [session.principal for session in server.sessions] == ["me"]


def test_many_calls_share_a_connection(connection, server):
    assert [ping(connection) for _ in range(100)] == [Done(0)] * 100
    assert server.connections == 1


@pytest.mark.parametrize("pieces", [[0, 5], [1], [1 << 20], [3] * (IOV_MAX + 2), [1 << 19, 0, 1, 1 << 19]], ids=str)
def test_payloads_arrive_whole_in_both_directions(connection, server, pieces):
    size_bytes = sum(pieces)
    sources = [memoryview(os.urandom(size)) for size in pieces]
    connection.call(WriteRequest(b"", 1, b"", b"", b""), Statuses, LONG_S, sources)

    reply, payload_bytes = connection.begin(ReadRequest(b"", b"", b"", size_bytes), ReadReply, LONG_S)
    destinations = [memoryview(bytearray(size)) for size in pieces]
    connection.take(destinations)

    assert server.sessions[0].received == b"".join(sources)
    assert (reply, payload_bytes) == (ReadReply(b"\1"), size_bytes)
    assert b"".join(destinations) == bytes([7]) * size_bytes
    assert ping(connection) == Done(0)
    assert server.sessions[0].sent.is_set()


def test_a_payload_nobody_asked_for_is_dropped_and_the_next_frame_read(connection):
    assert connection.call(Ping(), Done, LONG_S, [memoryview(bytes(3 << 20))]) == Done(0)
    assert ping(connection) == Done(0)


@pytest.mark.parametrize("name", ["UsageError", "UnknownNamespaceError", "CapacityError", "UnavailableError"])
def test_an_error_of_the_peer_is_raised_here_and_the_connection_goes_on(connection, name):
    with pytest.raises(getattr(errors, name), match="as scripted"):
        connection.call(DiscardRequest(name.encode(), b"", b""), Done, LONG_S)
    assert ping(connection) == Done(0)


def test_a_broken_contract_is_explained_and_the_connection_closed(connection, server):
    with pytest.raises(ProtocolError, match="not in the script"):
        connection.call(Hello.__base__.__subclasses__()[0](1, "x"), Done, LONG_S) if False else connection.call(
            Statuses(b""), Done, LONG_S
        )
    assert server.sessions[0].ended.wait(LONG_S)
    with pytest.raises(UnavailableError):
        ping(connection)
    assert connection.closed


def test_file_descriptors_follow_their_reply(tmp_path):
    (tmp_path / "file").write_bytes(b"shared")
    with running(lambda server: server.listen_unix(tmp_path / "socket")) as (_, uri):
        connection = Connection(uri, "me", LONG_S)
        connection.call(AttachRequest(os.fsencode(tmp_path / "file")), AttachReply, LONG_S)
        descriptors = connection.take_descriptors(2)

        assert [os.pread(descriptor, 10, 0) for descriptor in descriptors] == [b"shared", b"shared"]
        assert ping(connection) == Done(0)
        connection.close()
    for descriptor in descriptors:
        os.close(descriptor)
