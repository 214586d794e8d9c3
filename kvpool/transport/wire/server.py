"""Serves framed connections: one thread each, so that a stalled peer holds up nobody but itself.

Requests of one connection are answered in order. What a connection may ask is decided by its `Session`.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpool.core.errors import CapacityError, KvpoolError, OverloadedError, ProtocolError
from kvpool.core.limits import DEADLINE_S_MAX
from kvpool.core.principals import Principal, anyone
from kvpool.ops.logging import get_logger
from kvpool.transport.wire.connection import Buffers, FramedSocket
from kvpool.transport.wire.frame import Header
from kvpool.transport.wire.messages import PROTOCOL_VERSION, ErrorReply, Hello, Message, Welcome

STALL_S = 30.0
"""How long a peer may stop in the middle of a frame, or leave a reply unread, before its connection is closed."""

GRACE_S = 1.0
"""How long after its deadline a call's exchange is ended: its caller has given up, and may hold slots pinned."""

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

    def handle(self, request: Message, payload: "Payload") -> Reply:
        """Answer a request; a KvpoolError becomes an ErrorReply and the connection goes on."""

    def closed(self) -> None:
        """The connection is gone; release what it owned."""


class Payload:
    """The payload of the request at hand, to be received at most once, and dropped if the session does not.

    Attributes:
        size_bytes: Its length.
        timeout_s: Time that the peer gives the request; `STALL_S` when it does not say.
    """

    def __init__(self, framed: FramedSocket, size_bytes: int, deadline_ms: int = 0) -> None:
        self.size_bytes = size_bytes
        self.timeout_s = min(deadline_ms / 1000, DEADLINE_S_MAX) or STALL_S
        self._framed = framed
        self._left = size_bytes

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes of the payload."""
        if len(view) > self._left:
            raise ProtocolError(f"payload has {self._left} bytes left, not {len(view)}")
        self._left -= len(view)
        self._framed.receive_into(view)

    def skip(self, size_bytes: int) -> None:
        """Read and drop the next ``size_bytes``."""
        self._left -= size_bytes
        self._framed.drain(size_bytes)

    def is_wanted(self) -> bool:
        """Whether the peer is still there to be answered."""
        return not self._framed.hung_up()

    def drop(self) -> None:
        """Read what the session left over, so that the next frame can be read."""
        self.skip(self._left)


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
    """

    def __init__(self, identity: Identity, open_session: Callable[[int, bool], Session], connections_max: int) -> None:
        self._identity = identity
        self._open_session = open_session
        self._connections_max = connections_max
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
        self.failed_accepts = 0

    def listen_tcp(self, host: str, port: int) -> str:
        """Listen on TCP; returns ``tcp://host:port`` with the port that was given or found (0).

        Raises:
            CapacityError: The address is in use or not ours.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bind(sock, (host, port), f"{host}:{port}")
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{sock.getsockname()[1]}"

    def listen_unix(self, path: Path) -> str:
        """Listen on a Unix socket that only this user may open; a dead server's socket is replaced.

        Raises:
            CapacityError: A live server listens there, or the path cannot be used.
        """
        _remove_dead_socket(path)
        old_mask = os.umask(0o077)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._bind(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path), str(path))
        except OSError as error:
            raise CapacityError(f"cannot listen on {path}: {error}; choose another path") from error
        finally:
            os.umask(old_mask)
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

    def _bind(self, sock: socket.socket, address: object, shown: str) -> None:
        try:
            sock.bind(address)  # type: ignore[arg-type]
            sock.listen(BACKLOG)
        except (OSError, ValueError) as error:  # ValueError: a host or path that cannot be a name at all
            sock.close()
            raise CapacityError(f"cannot listen on {shown}: {error}; choose another address") from error
        self._listeners.append(sock)

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
        with self._lock:
            full = len(self._connections) - self._refusing >= self._connections_max
            self.refused_connections += full
            if self._stopping.is_set() or (full and self._refusing >= REFUSALS_MAX):
                sock.close()
                return
            self._accepted += 1
            framed = self._connections[self._accepted] = FramedSocket(sock)
            try:
                self._spawn(self._refuse if full else self._serve, self._accepted, framed)
            except (RuntimeError, MemoryError) as error:  # no memory for a thread: later there may be
                log.warning("connection_refused", server=self._identity.name, error=str(error))
                self.refused_connections += not full
                del self._connections[self._accepted]
                framed.close()
            else:
                self._refusing += full

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
            reply = self._answer(framed.receive_body(header), payload, session)
        except ProtocolError as error:
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

    def _answer(self, request: Message, payload: Payload, session: Session) -> Reply:
        if isinstance(request, Hello):
            self._check_version(request)
            session.greet(anyone(request.principal))
            return Reply(Welcome(PROTOCOL_VERSION, self._identity.name, self._identity.incarnation))
        try:
            return session.handle(request, payload)
        except ProtocolError:
            raise
        except KvpoolError as error:
            return Reply(_error_reply(error))

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


def _remove_dead_socket(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_socket():
        raise CapacityError(f"{path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CapacityError(f"cannot use {path} as a socket: {error}; choose another path") from error
        else:
            raise CapacityError(f"another server listens on {path}; stop it or choose another path")
