"""A framed connection over a blocking socket: exact reads, gathered writes, a deadline on every call.

One exchange at a time. After any failure in mid-exchange the stream's position is unknown, so the connection closes
itself; nothing else is safe.
"""

import socket
import ssl
import time
from collections import deque
from typing import TypeVar

from kvpool.core import errors
from kvpool.core.errors import AuthenticationError, DeadlineError, KvpoolError, ProtocolError, UnavailableError
from kvpool.ops.addresses import split_address
from kvpool.ops.credentials import TlsPeer
from kvpool.ops.handshakes import handshake_problem
from kvpool.transport.wire.framed import Buffers, FramedSocket
from kvpool.transport.wire.messages import PROTOCOL_VERSION, ErrorReply, Hello, Message, Welcome
from kvpool.transport.wire.tls import dial_tls

M = TypeVar("M", bound=Message)


class Connection:
    """The calling side: requests go out, their replies come back in order, or the connection is closed.

    Not thread-safe; `ConnectionPool` hands each caller its own.

    Args:
        uri: ``tcp://host:port``, ``tls://host:port`` or ``unix:///path``.
        principal: Who is calling.
        timeout_s: Bound on connecting and greeting.
        peer: Who must answer over TLS, and what to prove to it who is calling.

    Raises:
        AuthenticationError: Somebody else answers, or does not believe who is calling.
        UnavailableError: Nobody answers there in time.
        ProtocolError: Another protocol or version answers there.
    """

    def __init__(self, uri: str, principal: str, timeout_s: float, peer: TlsPeer | None = None) -> None:
        self.uri = uri
        self._correlation = 0
        self._posted: deque[int] = deque()
        until_s = time.monotonic() + timeout_s
        self._framed, token = _open(uri, timeout_s, until_s, peer)
        try:
            left_s = max(0.0, until_s - time.monotonic())
            self.welcome = self.call(Hello(PROTOCOL_VERSION, principal, token), Welcome, left_s)
            if self.welcome.version != PROTOCOL_VERSION:
                raise ProtocolError(f"{uri} speaks version {self.welcome.version}, this client {PROTOCOL_VERSION}")
        except BaseException:
            self.close()
            raise

    @property
    def waits(self) -> bool:
        """Whether replies are outstanding: nobody else may use the connection then."""
        return bool(self._posted)

    @property
    def closed(self) -> bool:
        """Whether the connection can no longer be used."""
        return self._framed.sock.fileno() < 0

    def call(self, request: Message, reply_type: type[M], timeout_s: float, payload: Buffers = ()) -> M:
        """Send ``request`` and wait for its reply, which must carry no payload.

        Raises:
            DeadlineError: No reply in ``timeout_s``; the connection is closed.
            UnavailableError: The connection broke.
            KvpoolError: What the peer answered instead; the connection stays usable.
        """
        self.post(request, timeout_s, payload)
        return self.collect(reply_type, max(0.0, self._framed.until_s - time.monotonic()))

    def post(self, request: Message, timeout_s: float, payload: Buffers = ()) -> None:
        """Send ``request`` only; its reply is collected later, in the order of posting. Raises as `call`."""
        self._correlation = (self._correlation + 1) & 0xFFFF_FFFF
        self._posted.append(self._correlation)
        try:
            self._start_time(timeout_s)
            self._framed.send(request, self._correlation, int(timeout_s * 1000), payload)
        except BaseException as error:
            self._fail(error)
            raise

    def collect(self, reply_type: type[M], timeout_s: float) -> M:
        """The reply to the oldest request posted, which must carry no payload. Raises as `call`."""
        reply, payload_bytes = self.begin(reply_type, timeout_s)
        if payload_bytes:
            self.close()
            raise ProtocolError(f"{reply_type.__name__} of {self.uri} carries a payload of {payload_bytes} bytes")
        return reply

    def begin(self, reply_type: type[M], timeout_s: float) -> tuple[M, int]:
        """Like `collect`, but the caller takes the reply's payload with `take` before anything else."""
        try:
            expected = self._posted.popleft()
            self._start_time(timeout_s)
            header = self._framed.receive_header()
            self._framed.arm(max(0.0, self._framed.until_s - time.monotonic()))
            reply = self._framed.receive_body(header)
            if header.correlation != expected:
                raise ProtocolError(f"{self.uri} answered call {header.correlation}, not {expected}")
        except BaseException as error:
            self._fail(error)
            raise
        if isinstance(reply, ErrorReply):
            raise _remote_error(reply)
        if not isinstance(reply, reply_type):
            self.close()
            raise ProtocolError(f"{self.uri} answered {type(reply).__name__}, not {reply_type.__name__}")
        return reply, header.payload_bytes

    def take(self, pieces: Buffers) -> None:
        """Receive the next part of the reply's payload into ``pieces``."""
        left_s = self._framed.until_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._framed.arm(left_s)
            if len(pieces) == 1:
                self._framed.receive_into(pieces[0])
            else:
                self._framed.receive_pieces(pieces)
        except BaseException as error:
            self._fail(error)
            raise

    def readable(self, timeout_s: float) -> bool:
        """Whether a reply has begun to arrive, or the peer has gone, within ``timeout_s``."""
        return self.closed or self._framed.readable(timeout_s)

    def take_descriptors(self, count: int) -> list[int]:
        """Receive ``count`` file descriptors; the caller owns them."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._framed.sock, 1, count)
        except OSError as error:
            self._fail(error)
            raise
        if len(descriptors) != count:
            self.close()
            raise ProtocolError(f"{self.uri} sent {len(descriptors)} file descriptors, not {count}")
        return list(descriptors)

    def close(self) -> None:
        """Close the connection; calling it again is harmless."""
        self._framed.close()

    def _start_time(self, timeout_s: float) -> None:
        self._framed.until_s = time.monotonic() + timeout_s
        self._framed.arm(timeout_s)

    def _fail(self, error: BaseException) -> None:
        """Close, and raise what the caller should see of ``error``, if that is something else."""
        self.close()
        if isinstance(error, BlockingIOError | TimeoutError):
            raise DeadlineError(f"{self.uri} did not answer in time") from error
        if isinstance(error, ssl.SSLError):
            raise AuthenticationError(f"{self.uri}: {handshake_problem(error)}") from error
        if isinstance(error, OSError):
            raise UnavailableError(f"{self.uri} cannot be reached: {error}") from error


def _open(uri: str, timeout_s: float, until_s: float, peer: TlsPeer | None) -> tuple[FramedSocket, str]:
    """A socket to ``uri``, and the token to greet with, if that is what proves who is calling."""
    if not uri.startswith("tls://"):
        return FramedSocket(_dial(uri, timeout_s)), ""
    if peer is None:
        raise AuthenticationError(f"{uri} speaks TLS; name certificates, e.g. with tls.dir (--tls-dir)")
    sock = _dial(uri, timeout_s)
    try:
        framed = dial_tls(uri, sock, peer, max(0.0, until_s - time.monotonic()))
    except OSError as error:
        sock.close()
        late = isinstance(error, TimeoutError)
        raise (DeadlineError if late else UnavailableError)(f"{uri} cannot be reached over TLS: {error}") from error
    return framed, peer.credentials.current().token


def _dial(uri: str, timeout_s: float) -> socket.socket:
    scheme, _, rest = uri.partition("://")
    try:
        if scheme == "unix":
            sock = _dial_unix(rest, timeout_s)
        elif scheme in {"tcp", "tls"}:
            sock = socket.create_connection(split_address(rest), timeout_s)
        else:
            raise errors.SettingsError(f"{uri!r} is not an address; write tcp://HOST:PORT or unix:///PATH")
    except errors.SettingsError:
        raise
    except (OSError, ValueError) as error:  # ValueError: what cannot be a host's name or a path at all
        raise UnavailableError(f"{uri} cannot be reached: {error}") from error
    sock.settimeout(None)
    return sock


def _dial_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _remote_error(reply: ErrorReply) -> KvpoolError:
    kind = getattr(errors, reply.error, None)
    if isinstance(kind, type) and issubclass(kind, KvpoolError):
        return kind(reply.message)
    return KvpoolError(f"{reply.error}: {reply.message}")
