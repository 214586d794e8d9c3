"""The serving side of framed connections: nobody can hold up anybody else, and nothing is left when it stops."""

import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from framed_peer import LONG_S, SOON_S, frame, receive_frame
from pki import Pki
from scripted_server import WELCOME_OF_SERVER, Server, greet, on_tcp, raw, read_until_closed, running

from kvpool.core import errors
from kvpool.core.errors import CapacityError, ProtocolError, UnavailableError
from kvpool.core.identities import node_identity
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from kvpool.ops.authentication import Authenticator
from kvpool.transport.wire import server as server_module
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.frame import HEADER_BYTES
from kvpool.transport.wire.messages import (
    AttachReply,
    AttachRequest,
    DiscardRequest,
    Done,
    Hello,
    Ping,
    ReadReply,
    ReadRequest,
    Statuses,
    WriteRequest,
)

MANY_BYTES = 32 << 20
"""More than sockets hold for a peer that does not read."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(params=["tcp", "tls", "unix"])
def served(request, tmp_path, pki):
    listen = (lambda server: server.listen_unix(tmp_path / "socket")) if request.param == "unix" else on_tcp
    guard = Authenticator(pki.credentials("node-n0")) if request.param == "tls" else None
    with running(listen, authenticator=guard) as started:
        yield started


@pytest.fixture
def server(served):
    return served[0]


@pytest.fixture
def sock(served, pki):
    with raw(served[1], pki.context("client") if served[1].startswith("tls") else None) as sock:
        yield sock


@pytest.fixture
def connect(served, pki):
    """Opens connections that are closed after the test."""
    opened = []
    peer = pki.credentials("client").toward(node_identity("n0"))

    def connect():
        opened.append(Connection(served[1], "engine", LONG_S, peer))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def ping(connection):
    return connection.call(Ping(), Done, LONG_S).count


# Calls


def test_a_peer_is_greeted_and_answered(connect, server):
    connection = connect()

    assert [ping(connection) for _ in range(3)] == [1, 1, 1]
    assert connection.welcome == WELCOME_OF_SERVER
    assert (server.sessions[0].principal.name, server.connections) == ("engine", 1)


def test_a_session_knows_whether_its_peer_is_on_this_host(connect, server):
    connection = connect()

    assert server.sessions[0].local == connection.uri.startswith("unix://")


def test_payloads_go_both_ways(connect, server):
    connection, payload = connect(), os.urandom(1 << 20)

    connection.call(WriteRequest(b"", 1, b"", b"", b""), Statuses, LONG_S, [memoryview(payload)])
    connection.post(ReadRequest(b"", b"", b"", 1 << 20), LONG_S)
    connection.begin(ReadReply, LONG_S)
    connection.take([memoryview(taken := bytearray(1 << 20))])

    assert (server.sessions[0].received, taken) == (payload, bytes([7]) * (1 << 20))
    assert server.sessions[0].sent.wait(LONG_S)


def test_a_payload_nobody_asked_for_is_dropped_and_the_next_frame_read(connect):
    connection = connect()

    assert connection.call(Ping(), Done, LONG_S, [memoryview(bytes(3 << 20))]) == Done(1)
    assert ping(connection) == 1


@pytest.mark.parametrize("name", ["UsageError", "UnknownNamespaceError", "CapacityError", "UnavailableError"])
def test_an_error_of_the_session_is_the_answer_and_the_connection_goes_on(connect, name):
    connection = connect()

    with pytest.raises(getattr(errors, name), match="as scripted"):
        connection.call(DiscardRequest(name.encode(), b"", b""), Done, LONG_S)
    assert ping(connection) == 1


def test_a_broken_contract_is_explained_and_the_connection_closed(connect, server):
    connection = connect()

    with pytest.raises(ProtocolError, match="not in the script"):
        connection.call(Statuses(b""), Done, LONG_S)
    assert server.sessions[0].ended.wait(LONG_S)
    with pytest.raises(UnavailableError):
        ping(connection)


def test_a_reply_over_the_frames_limit_is_an_error_and_the_connection_goes_on(connect, server):
    connection = connect()

    with pytest.raises(CapacityError, match="the limit is 4194304: name fewer blocks"):
        connection.call(DiscardRequest(b"long", b"", b""), Statuses, LONG_S)
    assert ping(connection) == 1
    assert server.sessions[0].sent.is_set()


def test_file_descriptors_follow_their_reply(tmp_path):
    (tmp_path / "file").write_bytes(b"shared")
    with running(lambda server: server.listen_unix(tmp_path / "socket")) as (_, uri):
        connection = Connection(uri, "me", LONG_S)
        connection.call(AttachRequest(os.fsencode(tmp_path / "file")), AttachReply, LONG_S)
        [descriptor] = connection.take_descriptors(1)

        assert os.pread(descriptor, 10, 0) == b"shared"
        assert ping(connection) == 1
        os.close(descriptor)
        connection.close()


# Peers that lie, stall or vanish


@pytest.mark.parametrize(
    "data",
    [
        frame(Ping(), body_bytes=FRAME_BODY_BYTES_MAX + 1),
        frame(Ping(), body_bytes=0xFFFF_FFFF),
        frame(Ping(), payload_bytes=FRAME_PAYLOAD_BYTES_MAX + 1),
        frame(Ping(), payload_bytes=(1 << 64) - 1),
        frame(Ping(), kind=9999),
        frame(Done(1), kind=Hello.kind),
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        frame(Ping(), body_bytes=0),
    ],
    ids=["body", "huge body", "payload", "huge payload", "kind", "other body", "other protocol", "no body"],
)
def test_a_frame_that_cannot_be_costs_the_connection_and_no_memory(server, sock, connect, data):
    greet(sock)
    tracemalloc.start()
    sock.sendall(data)
    read_until_closed(sock)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert server.sessions[0].ended.wait(LONG_S)
    assert peak_bytes < FRAME_BODY_BYTES_MAX / 4
    assert ping(connect()) == 2


@pytest.mark.parametrize("sent", [1, HEADER_BYTES, HEADER_BYTES + 1, -1], ids=["header", "body", "half", "payload"])
def test_a_peer_that_stalls_in_mid_frame_holds_up_nobody(sock, connect, sent):
    greet(sock)
    sock.sendall(frame(WriteRequest(b"", 1, b"", b"", b""), payload=bytes(1000))[:sent])

    assert ping(connect()) == 2


def test_a_peer_that_does_not_read_holds_up_nobody(server, sock, connect):
    greet(sock)
    sock.sendall(frame(ReadRequest(b"", b"", b"", MANY_BYTES)))
    assert server.sessions[0].began.wait(LONG_S)

    assert ping(connect()) == 2
    assert not server.sessions[0].sent.is_set()


@pytest.fixture
def short_stall(monkeypatch):
    monkeypatch.setattr(server_module, "STALL_S", SOON_S)


def test_an_idle_connection_is_kept(short_stall, sock, served):
    greet(sock)
    sock.settimeout(10 * SOON_S)
    with pytest.raises(TimeoutError):
        sock.recv(1)  # neither a byte nor an end in ten times what a stalled peer gets

    sock.sendall(frame(Ping()))
    assert receive_frame(sock) == frame(Done(1))


@pytest.mark.parametrize("sent", [1, HEADER_BYTES + 1, -1], ids=["header", "body", "payload"])
def test_a_stalled_connection_is_closed(short_stall, server, sock, sent):
    greet(sock)
    sock.sendall(frame(WriteRequest(b"", 1, b"", b"", b""), payload=bytes(1000))[:sent])

    read_until_closed(sock)
    assert server.sessions[0].ended.wait(LONG_S)


def test_a_peer_that_never_reads_is_closed_and_what_it_pinned_let_go(short_stall, server, sock):
    greet(sock)
    sock.sendall(frame(ReadRequest(b"", b"", b"", MANY_BYTES)))

    assert server.sessions[0].ended.wait(LONG_S)
    assert server.sessions[0].sent.is_set()


@pytest.mark.parametrize("payload_bytes", [0, 10], ids=["before the reply", "in mid payload"])
def test_what_a_peer_that_vanished_had_pinned_is_let_go(server, sock, payload_bytes):
    greet(sock)
    sock.sendall(frame(ReadRequest(b"", b"", b"", MANY_BYTES), payload_bytes=payload_bytes))
    assert server.sessions[0].began.wait(LONG_S)

    sock.close()

    assert server.sessions[0].ended.wait(LONG_S)
    assert server.sessions[0].sent.is_set()


# Stopping


def descriptors_open():
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_a_reader_that_stopped_holds_what_it_asked_for_up_to_its_deadline(server, sock):
    """Its connection is open and well, and idle ones may stay for ever."""
    greet(sock)
    sock.sendall(frame(ReadRequest(b"", b"", b"", MANY_BYTES), deadline_ms=1))
    assert server.sessions[0].sent.wait(LONG_S)
    assert server.sessions[0].ended.wait(LONG_S)


def test_a_byte_now_and_then_does_not_extend_it():
    with running(on_tcp) as (server, uri), raw(uri) as sock:
        greet(sock)
        sock.sendall(frame(ReadRequest(b"", b"", b"", MANY_BYTES), deadline_ms=1))
        while not server.sessions[0].sent.is_set():
            sock.recv(1)
        assert server.sessions[0].ended.wait(LONG_S)


def test_idle_means_that_no_request_is_being_served(server, sock):
    greet(sock)
    assert server.wait_idle(LONG_S)

    sock.sendall(frame(DiscardRequest(b"hold", b"", b"")))
    assert server.sessions[0].began.wait(LONG_S)
    assert not server.wait_idle(0)

    server.hold.set()
    assert server.wait_idle(LONG_S)


@pytest.mark.parametrize("state", ["idle", "stalled", "never read", "refused"])
def test_stopping_leaves_neither_thread_nor_descriptor_nor_socket(tmp_path, state):
    threads, descriptors = set(threading.enumerate()), descriptors_open()
    server = Server(connections_max=3)
    uris = [on_tcp(server), server.listen_unix(tmp_path / "socket")]
    server.start()
    socks = []
    for uri in (*uris, uris[0]):
        with raw(uri) as opened:
            socks.append(opened.dup())
            socks[-1].settimeout(LONG_S)
            greet(socks[-1])
    if state == "stalled":
        socks[0].sendall(frame(Ping())[:5])
    elif state == "never read":
        socks[0].sendall(frame(ReadRequest(b"", b"", b"", MANY_BYTES)))
        server.sessions[0].began.wait(LONG_S)
    elif state == "refused":
        with raw(uris[0]) as refused:
            read_until_closed(refused)

    server.stop()
    server.stop()

    assert all(session.ended.is_set() for session in server.sessions)
    for sock in socks:
        read_until_closed(sock)
        sock.close()
    assert set(threading.enumerate()) <= threads
    assert descriptors_open() <= descriptors
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_was_never_started_can_be_stopped(tmp_path):
    server = Server()
    server.listen_unix(tmp_path / "socket")

    server.stop()

    assert list(tmp_path.iterdir()) == []


def test_peers_of_a_stopped_server_find_it_unavailable(served, connect):
    connection = connect()
    served[0].stop()

    with pytest.raises(UnavailableError):
        ping(connection)
    with pytest.raises(UnavailableError):
        connect()
