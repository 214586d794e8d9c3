"""A framed server whose sessions do what the fields of a request say, and remember what they were told."""

import os
import socket
import threading
from contextlib import contextmanager, suppress

from framed_peer import LONG_S, frame, receive_frame, wait_until_closed

from kvpool.core import errors
from kvpool.core.errors import ProtocolError
from kvpool.core.limits import FRAME_BODY_BYTES_MAX
from kvpool.transport.wire.connection import split_address
from kvpool.transport.wire.messages import (
    PROTOCOL_VERSION,
    AttachReply,
    AttachRequest,
    DiscardRequest,
    Done,
    Hello,
    LocateRequest,
    MatchRequest,
    Ping,
    ReadReply,
    ReadRequest,
    Statuses,
    Welcome,
    WriteRequest,
)
from kvpool.transport.wire.server import FramedServer, Identity, Reply

WELCOME_OF_SERVER = Welcome(PROTOCOL_VERSION, "scripted", 7)


class Scripted:
    """One connection's session: does what the request's fields say, and remembers what it was told."""

    def __init__(self, number, local, hold):
        self.number, self.local, self._hold = number, local, hold
        self.principal = self.received = None
        self.began, self.sent, self.ended = threading.Event(), threading.Event(), threading.Event()

    def greet(self, principal):
        self.principal = principal

    def handle(self, request, payload):
        self.began.set()
        match request:
            case Ping():
                return Reply(Done(self.number))
            case ReadRequest(block_bytes=size_bytes):
                return Reply(ReadReply(b"\1"), [memoryview(bytes([7]) * size_bytes)], sent=self.sent.set)
            case WriteRequest():
                self.received = bytearray(payload.size_bytes)
                payload.receive_into(memoryview(self.received))
                return Reply(Statuses(b"\0"))
            case AttachRequest(segment_id=path):
                descriptor = os.open(path, os.O_RDONLY)
                return Reply(AttachReply(1), descriptors=[descriptor], sent=lambda: os.close(descriptor))
            case DiscardRequest(segment_id=b"hold") | MatchRequest() | LocateRequest():
                self._hold.wait(LONG_S)
                return Reply(Done(self.number))
            case DiscardRequest(segment_id=b"long"):
                return Reply(Statuses(bytes(FRAME_BODY_BYTES_MAX)), sent=self.sent.set)
            case DiscardRequest(segment_id=name):
                raise getattr(errors, name.decode())("as scripted")
        raise ProtocolError("not in the script")

    def closed(self):
        self.ended.set()


class Server(FramedServer):
    """A framed server and the sessions it has opened."""

    def __init__(self, connections_max=64, authenticator=None):
        self.sessions, self.hold = [], threading.Event()
        identity = Identity(WELCOME_OF_SERVER.name, WELCOME_OF_SERVER.incarnation)
        super().__init__(identity, self._open, connections_max, authenticator)

    def _open(self, number, local):
        self.sessions.append(Scripted(number, local, self.hold))
        return self.sessions[-1]


@contextmanager
def running(listen, **options):
    """A started server and its URI; stopped at the end."""
    server = Server(**options)
    try:
        uri = listen(server)
        server.start()
        yield server, uri
    finally:
        server.hold.set()
        server.stop()


def on_tcp(server):
    return server.listen_tcp("127.0.0.1", 0)


@contextmanager
def raw(uri, context=None):
    """A socket to a framed port, in the hands of the test; with ``context`` over TLS."""
    scheme, _, rest = uri.partition("://")
    with socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET) as sock:
        sock.settimeout(LONG_S)
        sock.connect(rest if scheme == "unix" else split_address(rest))
        if context is None:
            yield sock
            return
        with context.wrap_socket(sock) as secured:
            yield secured


def greet(sock):
    """Greet as clients do; the server has a session then."""
    sock.sendall(frame(Hello(PROTOCOL_VERSION, "raw"), 1))
    assert receive_frame(sock) == frame(WELCOME_OF_SERVER, 1)


def read_until_closed(sock):
    with suppress(ConnectionResetError):  # closed with something unread
        wait_until_closed(sock)
