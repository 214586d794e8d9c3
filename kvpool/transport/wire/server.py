"""Serves framed connections: one thread each, so that a stalled peer holds up nobody but itself.

Requests of one connection are answered in order. What a connection may ask is decided by its `Session`.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpool.core.access import require_request
from kvpool.core.errors import (
    AuthenticationError,
    CapacityError,
    ForbiddenError,
    KvpoolError,
    OverloadedError,
    ProtocolError,
)
from kvpool.core.limits import DEADLINE_S_MAX
from kvpool.core.principals import Principal, anyone
from kvpool.ops.addresses import shown_host
from kvpool.ops.audit import Audit
from kvpool.ops.authentication import Authenticator
from kvpool.ops.logging import get_logger
from kvpool.ops.tracing import Tracer
from kvpool.transport.wire.accepting import accept, meet, shown_peer, turn_away
from kvpool.transport.wire.frame import Header
from kvpool.transport.wire.framed import Buffers, FramedSocket
from kvpool.transport.wire.listening import open_tcp, open_unix
from kvpool.transport.wire.messages import PROTOCOL_VERSION, ErrorReply, Hello, Message, Welcome
from kvpool.transport.wire.payload import Payload

STALL_S = 30.0
"""How long a peer may stop in the middle of a frame, or leave a reply unread, before its connection is closed."""

GRACE_S = 1.0
"""How long after its deadline a call's exchange is ended: its caller has given up, and may hold slots pinned."""

HELLO_BYTES_MAX = 4096
"""The greeting: all that is taken from somebody who has not said yet who it is."""

REFUSALS_MAX = 16
REFUSAL_S = 1.0
"""Connections over the limit that are told so at a time, and how long each may take to greet; more are just closed."""

ACCEPT_PAUSE_S = 0.1
"""Between attempts to accept while that fails."""

BACKLOG = 256

NO_MEMORY = "no memory for this request now; ask for less, or give the process more"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request is answered with.

    Attributes:
        message: The body.
        payload: Buffers to send behind it, straight from where they are.
        descriptors: File descriptors to pass after the frame (Unix sockets only); the session keeps them open.
        sent: Called when the reply has left, or failed to: unpin here.
    """

    message: Message
    payload: Buffers = ()
    descriptors: Sequence[int] = ()
    sent: Callable[[], None] | None = None


class Session(Protocol):
    """One connection's side of a service. Its methods run on the connection's thread only."""

    def greet(self, principal: Principal) -> None:
        """The peer says who it is."""

    def handle(self, request: Message, payload: Payload) -> Reply:
        """Answer a request; a KvpoolError becomes an ErrorReply and the connection goes on."""

    def closed(self) -> None:
        """The connection is gone; release what it owned."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the server says it is when greeted."""

    name: str
    incarnation: int


class FramedServer:
    """Listens on TCP and Unix addresses and runs a session for each connection.

    Args:
        identity: What Welcome says.
        open_session: Makes the session of a new connection; gets its number, unique in this server's life, and
            whether it came over a Unix socket.
        connections_max: Further connections are refused and counted.
        authenticator: Who may come over TCP, with TLS; None: anybody, in plaintext.
        audit: Where refusals are told.
        tracer: Records what is served for callers who record their requests.
    """

    def __init__(
        self,
        identity: Identity,
        open_session: Callable[[int, bool], Session],
        connections_max: int,
        authenticator: Authenticator | None = None,
        audit: Audit | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._audit = audit or Audit()
        self._tracer = tracer or Tracer()
        self._identity = identity
        self._open_session = open_session
        self._connections_max = connections_max
        self._authenticator = authenticator
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._unix_paths: list[Path] = []
        self._connections: dict[int, FramedSocket] = {}
        self._refusing = 0
        self._threads: set[threading.Thread] = set()
        self._accepted = 0
        self._busy = 0
        self._idle = threading.Condition()
        self._stopping = threading.Event()
        self.refused_connections = 0
        self.refused_callers = 0
        self.failed_accepts = 0

    def listen_tcp(self, host: str, port: int) -> str:
        """Listen on TCP; returns ``tcp://host:port``, or ``tls://``, with the port that was given or found (0).

        Raises:
            CapacityError: The address is in use or not ours.
        """
        sock = open_tcp(host, port, BACKLOG)
        self._listeners.append(sock)
        shown = shown_host(host)
        scheme = "tcp" if self._authenticator is None else "tls"
        return f"{scheme}://{shown}:{sock.getsockname()[1]}"

    def listen_unix(self, path: Path) -> str:
        """Listen on a Unix socket that only this user may open; a dead server's socket is replaced.

        Raises:
            CapacityError: A live server listens there, or the path cannot be used.
        """
        self._listeners.append(open_unix(path, BACKLOG))
        self._unix_paths.append(path)
        return f"unix://{path}"

    def start(self) -> None:
        """Begin to accept, on a thread for each listener."""
        for listener in self._listeners:
            self._spawn(self._accept, listener)

    def stop(self) -> None:
        """Close listeners and connections and wait for their threads."""
        with self._lock:
            self._stopping.set()
            connections = list(self._connections.values())
        for listener in self._listeners:
            with suppress(OSError):  # never listened
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for framed in connections:
            framed.close()
        for thread in list(self._threads):
            thread.join()
        for path in self._unix_paths:
            path.unlink(missing_ok=True)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is being served; False when that takes longer than ``timeout_s``."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, timeout_s)

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"framed-{target.__name__}", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                # No descriptor is free, say: whoever waits is served when one is.
                log.warning("accept_failed", server=self._identity.name, error=str(error))
                self.failed_accepts += 1
                self._stopping.wait(ACCEPT_PAUSE_S)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Serve a new connection, refuse it with a reason while there is room for that, or close it."""
        try:
            framed = accept(sock, self._authenticator)
        except OSError:  # gone before it was met
            sock.close()
            return
        with self._lock:
            full = len(self._connections) - self._refusing >= self._connections_max
            self.refused_connections += full
            if self._stopping.is_set() or (full and self._refusing >= REFUSALS_MAX):
                framed.close()
                return
            self._accepted += 1
            self._connections[self._accepted] = framed
            try:
                self._spawn(self._meet, self._accepted, framed, self._refuse if full else self._serve)
            except (RuntimeError, MemoryError) as error:  # no memory for a thread: later there may be
                log.warning("connection_refused", server=self._identity.name, error=str(error))
                self.refused_connections += not full
                del self._connections[self._accepted]
                framed.close()
            else:
                self._refusing += full

    def _meet(self, number: int, framed: FramedSocket, serve: Callable[[int, FramedSocket], None]) -> None:
        """Find out who is there, and then ``serve`` the connection."""
        try:
            meet(framed)
        except (OSError, AuthenticationError) as error:
            if isinstance(error, AuthenticationError):
                self._turn_away(framed, error)
            framed.close()
            self._forget(number, refused=serve == self._refuse)
        else:
            serve(number, framed)

    def _turn_away(self, framed: FramedSocket, error: AuthenticationError) -> None:
        with self._lock:
            self.refused_callers += 1
        log.warning("caller_refused", server=self._identity.name, peer=shown_peer(framed), reason=str(error))
        self._audit.refused(shown_peer(framed), "connection", error)
        turn_away(framed)

    def _forbid(self, principal: Principal, request: Message, error: ForbiddenError) -> None:
        """Count and tell that a caller asked for what it may not have; its connection goes on."""
        with self._lock:
            self.refused_callers += 1
        what = type(request).__name__
        log.warning("request_refused", server=self._identity.name, by=principal.name, what=what, reason=str(error))
        self._audit.refused(principal, what, error)

    def _refuse(self, number: int, framed: FramedSocket) -> None:
        """Answer the greeting with why there is no more: a peer can tell a full server from a dead one."""
        try:
            framed.arm(REFUSAL_S)
            framed.until_s = time.monotonic() + REFUSAL_S
            header = framed.receive_header()
            framed.receive_body(header)
            why = f"{self._identity.name} serves {self._connections_max} connections already; try again later"
            framed.send(_error_reply(OverloadedError(why)), header.correlation)
        except (OSError, ProtocolError):
            pass  # not worth a line for each: they are counted
        finally:
            framed.close()
            self._forget(number, refused=1)

    def _serve(self, number: int, framed: FramedSocket) -> None:
        session = self._open_session(number, framed.sock.family == socket.AF_UNIX)
        try:
            framed.arm(STALL_S)
            while True:
                self._serve_one(framed, session)
        except AuthenticationError as error:
            self._turn_away(framed, error)
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                log.warning("connection_closed", server=self._identity.name, connection=number, error=str(error))
        finally:
            framed.close()  # first: what the session gives up must not be written any more
            session.closed()
            self._forget(number)

    def _forget(self, number: int, refused: int = 0) -> None:
        with self._lock:
            self._refusing -= refused
            del self._connections[number]
            self._threads.discard(threading.current_thread())

    def _serve_one(self, framed: FramedSocket, session: Session) -> None:
        header = framed.poll_header()
        if header is None:
            if self._authenticator is not None and framed.caller is None:
                raise AuthenticationError(f"it did not say who it is in {STALL_S:g} s")
            return  # idle: a peer may take as long as it likes to begin a frame
        self._count_busy(1)
        try:
            _limit_time(framed, header.deadline_ms)
            self._exchange(framed, header, session)
        finally:
            self._count_busy(-1)
            framed.until_s = math.inf

    def _count_busy(self, change: int) -> None:
        with self._idle:
            self._busy += change
            if not self._busy:
                self._idle.notify_all()

    def _exchange(self, framed: FramedSocket, header: Header, session: Session) -> None:
        payload = Payload(framed, header.payload_bytes, header.deadline_ms)
        try:
            if framed.caller is None and header.body_bytes > HELLO_BYTES_MAX:
                raise ProtocolError(f"a first frame of {header.body_bytes} bytes; a connection begins with Hello")
            reply = self._answer(framed.receive_body(header), payload, framed, session)
        except (ProtocolError, AuthenticationError) as error:
            framed.send(_error_reply(error), header.correlation)
            raise
        except MemoryError:
            log.warning("out_of_memory", server=self._identity.name, kind=header.kind, body_bytes=header.body_bytes)
            reply = Reply(_error_reply(CapacityError(NO_MEMORY)))
        try:
            payload.drop()
            self._send(framed, reply, header.correlation)
            if reply.descriptors:
                socket.send_fds(framed.sock, [b"F"], list(reply.descriptors))
        finally:
            if reply.sent is not None:
                reply.sent()

    def _send(self, framed: FramedSocket, reply: Reply, correlation: int) -> None:
        try:
            framed.send(reply.message, correlation, payload=reply.payload)
        except CapacityError as error:  # too long: nothing of it was sent
            framed.send(_error_reply(error), correlation)

    def _answer(self, request: Message, payload: Payload, framed: FramedSocket, session: Session) -> Reply:
        if isinstance(request, Hello):
            self._check_version(request)
            caller = self._caller(request, framed)
            session.greet(caller)
            framed.caller = caller
            return Reply(Welcome(PROTOCOL_VERSION, self._identity.name, self._identity.incarnation))
        if framed.caller is None:
            raise ProtocolError(f"{type(request).__name__} before Hello: a connection begins with that")
        try:
            if request.kind % 2 == 0:  # what answers is no request: the session says so and closes
                require_request(framed.caller, type(request).__name__)
            with self._tracer.serve(f"kvpool.serve.{request.step}", framed.trace):
                return session.handle(request, payload)
        except ProtocolError:
            raise
        except ForbiddenError as error:
            self._forbid(framed.caller, request, error)
            return Reply(_error_reply(error))
        except KvpoolError as error:
            return Reply(_error_reply(error))

    def _caller(self, hello: Hello, framed: FramedSocket) -> Principal:
        """Who calls. Over a Unix socket it is this host's own user, who could read this process's keys anyway."""
        if self._authenticator is None or framed.sock.family == socket.AF_UNIX:
            return anyone(hello.principal)
        return self._authenticator.caller(framed.identities, hello.token)

    def _check_version(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            log.warning("version_mismatch", server=self._identity.name, theirs=hello.version, ours=PROTOCOL_VERSION)


def _limit_time(framed: FramedSocket, deadline_ms: int) -> None:
    """Bound an exchange by its caller's deadline: one that stopped, or takes a byte now and then, holds up nothing."""
    left_s = min(deadline_ms / 1000 or DEADLINE_S_MAX, DEADLINE_S_MAX) + GRACE_S
    framed.until_s = time.monotonic() + left_s
    framed.arm(min(STALL_S, math.ceil(left_s)))  # whole seconds: the same for most calls, and not set anew then


def _error_reply(error: KvpoolError) -> ErrorReply:
    return ErrorReply(type(error).__name__, str(error))
