"""The calling side of framed connections: deadlines, broken and lying peers, and nothing left behind."""

import os
import signal
import socket
import threading
from contextlib import contextmanager

import pytest
from framed_peer import LONG_S, SOON_S, WELCOME, Peer, frame, receive, receive_frame, wait_until_closed

from kvpool.core import errors
from kvpool.core.errors import DeadlineError, ProtocolError, SettingsError, UnavailableError
from kvpool.transport.wire.connection import Connection, split_address
from kvpool.transport.wire.frame import HEADER_BYTES
from kvpool.transport.wire.framed import IOV_MAX, SILENT_S, FramedSocket
from kvpool.transport.wire.messages import (
    PROTOCOL_VERSION,
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

TCP_TIMES = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")


def replying(*frames):
    """Answers the first call with these bytes, and waits for the caller to close."""

    def answer(sock):
        receive_frame(sock)
        for data in frames:
            sock.sendall(data)
        wait_until_closed(sock)

    return answer


def closing_after(data):
    """Answers the first call with these bytes and closes."""

    def answer(sock):
        receive_frame(sock)
        sock.sendall(data)

    return answer


@pytest.fixture
def peer(tmp_path):
    """Starts a peer; it is gone after the test."""
    peers = []

    def start(answer, **options):
        peers.append(Peer(tmp_path / f"peer-{len(peers)}", answer, **options))
        return peers[-1]

    yield start
    for started in peers:
        started.close()


@pytest.fixture
def connect(peer):
    """Connections to peers with these answers; closed after the test."""
    opened = []

    def connect(answer):
        opened.append(Connection(peer(answer).uri, "me", LONG_S))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def ping(connection, timeout_s=LONG_S):
    return connection.call(Ping(), Done, timeout_s)


def begin_read(connection, timeout_s=LONG_S):
    connection.post(ReadRequest(b"", b"", b"", 4), timeout_s)
    return connection.begin(ReadReply, timeout_s)


@contextmanager
def breaks(connection, error, match=None):
    """The call fails with ``error``, and the connection is never used again."""
    with pytest.raises(error, match=match):
        yield
    assert connection.closed
    with pytest.raises(UnavailableError):
        ping(connection)


# Deadlines


def test_a_peer_that_never_answers_costs_the_deadline_and_the_connection(connect):
    connection = connect(wait_until_closed)

    with breaks(connection, DeadlineError, "did not answer in time"):
        ping(connection, SOON_S)


def test_a_peer_that_sends_a_byte_now_and_then_does_not_extend_the_deadline(connect):
    def answer(sock):
        receive_frame(sock)
        sock.settimeout(SOON_S / 2)
        for byte in frame(Done(0)) * 3:
            try:
                sock.sendall(bytes([byte]))
                sock.recv(1)
            except TimeoutError:
                continue
            except OSError:
                pass
            return

    connection = connect(answer)

    with breaks(connection, DeadlineError):
        ping(connection, SOON_S)


def test_a_peer_that_never_reads_costs_the_deadline_and_the_connection(connect):
    finished = threading.Event()
    connection = connect(lambda sock: finished.wait(LONG_S))

    with breaks(connection, DeadlineError):
        connection.call(WriteRequest(b"", 1, b"", b"", b""), Statuses, SOON_S, [memoryview(bytes(16 << 20))])
    finished.set()


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_payload_that_stops_half_way_costs_the_deadline_and_the_connection(connect, pieces):
    connection = connect(replying(frame(ReadReply(b"\1"), payload_bytes=8) + bytes(4)))
    begin_read(connection, SOON_S)

    with breaks(connection, DeadlineError):
        connection.take([memoryview(bytearray(8 // pieces)) for _ in range(pieces)])


def test_the_caller_may_be_interrupted_and_the_connection_is_not_used_again(connect):
    class Interrupted(BaseException):
        pass

    def interrupt(number, where):
        raise Interrupted

    def answer(sock):
        receive_frame(sock)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until_closed(sock)

    connection = connect(answer)
    old = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with breaks(connection, Interrupted):
            ping(connection)
    finally:
        signal.signal(signal.SIGUSR1, old)


# Peers that break off, or lie


@pytest.mark.parametrize("kept", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
def test_a_peer_that_closes_in_mid_frame_is_unavailable(connect, kept):
    connection = connect(closing_after(frame(Done(0))[:kept]))

    with breaks(connection, UnavailableError):
        ping(connection)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_peer_that_closes_in_mid_payload_is_unavailable(connect, pieces):
    connection = connect(closing_after(frame(ReadReply(b"\1"), payload_bytes=8) + bytes(5)))
    begin_read(connection)

    with breaks(connection, UnavailableError):
        connection.take([memoryview(bytearray(8 // pieces)) for _ in range(pieces)])


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        (frame(Done(0), correlation=1), "answered call 1, not 2"),
        (frame(Done(0), correlation=3), "answered call 3, not 2"),
        (frame(Statuses(b"")), "answered Statuses, not Done"),
        (frame(Done(0), payload=b"more"), "carries a payload of 4 bytes"),
        (frame(Done(0), kind=9999), "kind 9999 is not known"),
        (frame(Done(0), body_bytes=0xFFFF_FFFF), "the limit is"),
        (frame(Done(0), payload_bytes=1 << 62), "the limit is"),
        (frame(Done(0), kind=Statuses.kind), "Statuses cannot be read"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), "not kvpool's framed port"),
    ],
    ids=["earlier", "later", "other reply", "payload", "unknown", "huge body", "huge payload", "other kind", "other"],
)
def test_a_peer_that_breaks_the_contract_is_not_used_again(connect, reply, shown):
    connection = connect(replying(reply))

    with breaks(connection, ProtocolError, shown):
        ping(connection)


def test_an_error_of_the_peer_is_raised_here_and_the_connection_goes_on(connect):
    connection = connect(replying(frame(ErrorReply("CapacityError", "full")), frame(Done(3), 3)))

    with pytest.raises(errors.CapacityError, match="full"):
        ping(connection)
    assert ping(connection) == Done(3)


@pytest.mark.parametrize("name", ["NoSuchError", "__doc__", "KvpoolError", "annotations", ""])
def test_an_error_this_version_does_not_know_is_still_an_error_of_ours(connect, name):
    connection = connect(replying(frame(ErrorReply(name, "as it says"))))

    with pytest.raises(errors.KvpoolError, match="as it says"):
        ping(connection)


# Several calls at once


def test_replies_come_in_the_order_of_posting(connect):
    connection = connect(replying(frame(Done(1), 2), frame(Done(2), 3)))
    connection.post(Ping(), LONG_S)
    connection.post(Ping(), LONG_S)
    assert connection.waits

    assert [connection.collect(Done, LONG_S).count for _ in range(2)] == [1, 2]
    assert not connection.waits


@pytest.mark.parametrize("pieces", [[1], [1 << 20], [3] * (IOV_MAX + 2), [1 << 19, 0, 1, 1 << 19]], ids=len)
def test_a_payload_is_sent_and_taken_in_pieces(connect, pieces):
    def echo(sock):
        receive_frame(sock)
        data = receive(sock, sum(pieces))
        sock.sendall(frame(ReadReply(b"\1"), payload=data))
        wait_until_closed(sock)

    connection = connect(echo)
    sources = [memoryview(os.urandom(size)) for size in pieces]
    destinations = [memoryview(bytearray(size)) for size in pieces]

    connection.post(WriteRequest(b"", 1, b"", b"", b""), LONG_S, sources)
    reply, payload_bytes = connection.begin(ReadReply, LONG_S)
    connection.take(destinations)

    assert (reply, payload_bytes) == (ReadReply(b"\1"), sum(pieces))
    assert b"".join(sources) == b"".join(destinations)


# Connecting


@pytest.mark.parametrize(
    ("greeting", "error", "shown"),
    [
        (frame(Welcome(99, "peer", 7), 1), ProtocolError, "speaks version 99"),
        (frame(ErrorReply("CapacityError", "full"), 1), errors.CapacityError, "full"),
        (frame(Done(0), 1), ProtocolError, "answered Done, not Welcome"),
        (b"220 mail.example.org ESMTP ready\r\n" + bytes(40), ProtocolError, "framed port"),
        (b"", DeadlineError, "did not answer in time"),
    ],
    ids=["version", "refused", "other reply", "other protocol", "silence"],
)
def test_a_greeting_that_fails_leaves_no_connection(peer, greeting, error, shown):
    silent = peer(wait_until_closed, greeting=greeting)  # ends when the connection is closed

    with pytest.raises(error, match=shown):
        Connection(silent.uri, "me", SOON_S if error is DeadlineError else LONG_S)


def test_the_greeting_says_who_is_calling(peer):
    greeted = peer(wait_until_closed)
    connection = Connection(greeted.uri, "engine-1", LONG_S)
    connection.close()
    connection.close()

    assert greeted.hello[HEADER_BYTES:] == encode(Hello(PROTOCOL_VERSION, "engine-1"))
    assert connection.welcome == WELCOME


@pytest.mark.parametrize(
    "uri",
    [
        "tcp://127.0.0.1:1",
        "tcp://no..such.host:1",
        "tcp://\udcff:1",
        "unix:///no/such/path",
        "unix:///a\0b",
        "unix:///" + "long" * 40,
        "unix://",
    ],
    ids=ascii,
)
def test_where_nobody_can_be_is_unavailable(uri):
    with pytest.raises(UnavailableError, match="cannot be reached"):
        Connection(uri, "me", LONG_S)


@pytest.mark.parametrize("uri", ["ftp://h:1", "127.0.0.1:1", "tcp://h", "tcp://:1", "tcp://h:x", "tcp://h:65536", ""])
def test_what_is_no_address_is_refused_with_the_fix(uri):
    with pytest.raises(SettingsError, match="is not an address; write "):
        Connection(uri, "me", LONG_S)


def test_ipv6_addresses_stand_in_brackets():
    assert split_address("[::1]:7310") == ("::1", 7310)
    assert split_address("host:0") == ("host", 0)


def test_a_message_over_the_frames_limit_is_refused_before_anything_is_sent():
    near, far = socket.socketpair()
    with near, far, pytest.raises(errors.CapacityError, match="Statuses of 5242886 bytes; the limit is 4194304"):
        FramedSocket(near).send(Statuses(bytes(5 << 20)), 1)
    assert far.fileno() < 0


def test_a_frame_may_take_its_time_to_begin():
    near, far = socket.socketpair()
    with near, far:
        framed = FramedSocket(near)
        framed.arm(SOON_S)
        assert [framed.poll_header() for _ in range(3)] == [None, None, None]

        far.sendall(frame(Ping()))
        assert framed.receive_body(framed.poll_header()) == Ping()


def test_a_host_that_vanishes_without_a_word_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        FramedSocket(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        tcp = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in TCP_TIMES}
    idle_s, interval_s, count, unanswered_ms = tcp.values()
    assert idle_s + interval_s * count == SILENT_S == unanswered_ms / 1000
