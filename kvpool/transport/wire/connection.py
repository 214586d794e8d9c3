"""A framed connection over a blocking socket: exact reads, gathered writes, a deadline on every call.

One exchange at a time. After any failure in mid-exchange the stream's position is unknown, so the connection closes
itself; nothing else is safe.
"""

import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from kvpool.core import errors
from kvpool.core.errors import CapacityError, DeadlineError, KvpoolError, ProtocolError, UnavailableError
from kvpool.core.limits import FRAME_BODY_BYTES_MAX
from kvpool.ops.failpoints import failpoint
from kvpool.transport.blocks import rest_of
from kvpool.transport.wire.frame import HEADER_BYTES, Header, pack_header, parse_header
from kvpool.transport.wire.messages import (
    PROTOCOL_VERSION,
    ErrorReply,
    Hello,
    Message,
    Welcome,
    decode,
    encode,
)

IOV_MAX = 1024
"""Buffers the kernel takes in one sendmsg or recvmsg."""

SCRAP_BYTES = 1 << 16
"""What nobody wants is read into so much memory, which is there when no more is."""

_ARM_SLACK_S = 0.05

SILENT_S = 60
"""A peer over TCP whose host does not answer for so long is gone. Without it a host that vanished without a word would
keep its connection, and what belongs to that, for ever."""

_PROBE_S = 10

Buffers = Sequence[memoryview]
M = TypeVar("M", bound=Message)


class FramedSocket:
    """Sends and receives whole frames. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.until_s = math.inf
        """When the exchange at hand must be over; looked at when a system call did less than it was asked for."""
        self._armed_s = -1.0
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 2)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // 2 // _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)

    def arm(self, timeout_s: float) -> None:
        """Bound each following system call by about ``timeout_s``.

        The kernel's own timers, unlike Python's, cost no poll() before each read and let MSG_WAITALL work.
        """
        if abs(timeout_s - self._armed_s) <= _ARM_SLACK_S:
            return
        self._armed_s = timeout_s
        value = struct.pack("ll", int(timeout_s), max(1, int(timeout_s % 1 * 1e6)))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, message: Message, correlation: int, deadline_ms: int = 0, payload: Buffers = ()) -> None:
        """Send one frame; ``payload`` goes out straight from its buffers."""
        body = encode(message)
        if len(body) > FRAME_BODY_BYTES_MAX:
            raise CapacityError(
                f"{type(message).__name__} of {len(body)} bytes; the limit is {FRAME_BODY_BYTES_MAX}: name fewer blocks"
            )
        payload_bytes = sum(len(piece) for piece in payload)
        header = pack_header(Header(message.kind, correlation, deadline_ms, len(body), payload_bytes))
        if payload:
            self._send_buffers([memoryview(header + body), *payload])
        else:
            self.sock.sendall(header + body)

    def receive_header(self) -> Header:
        """The next frame's header, checked."""
        header = self.poll_header()
        if header is None:
            raise BlockingIOError("no frame in time")
        return header

    def poll_header(self) -> Header | None:
        """The next frame's header, or None when none has begun within the armed time."""
        header = bytearray(HEADER_BYTES)
        try:
            count = self.sock.recv_into(header, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return None
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        if count < HEADER_BYTES:
            self._check_time()
            self.receive_into(memoryview(header)[count:])
        return parse_header(header)

    def receive_body(self, header: Header) -> Message:
        """The message of the frame whose header was just received."""
        try:
            body = bytearray(header.body_bytes)
        except MemoryError:
            self.drain(header.body_bytes)  # the next frame can be read, when there is memory for it
            raise
        self.receive_into(memoryview(body))
        return decode(header.kind, body)

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` from the stream."""
        received = 0
        while received < len(view):
            count = self.sock.recv_into(view[received:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            received += count
            if received < len(view):
                self._check_time()

    def receive_pieces(self, pieces: Buffers) -> None:
        """Fill several buffers, scattered by the kernel."""
        for start in range(0, len(pieces), IOV_MAX):
            group = list(pieces[start : start + IOV_MAX])
            while group:
                count = self.sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
                if not count:
                    raise ConnectionResetError("the peer closed the connection")
                group = rest_of(group, count)
                if group:
                    self._check_time()

    def drain(self, size_bytes: int) -> None:
        """Read and drop ``size_bytes``, to reach the next frame."""
        scrap = memoryview(bytearray(min(size_bytes, SCRAP_BYTES)))
        while size_bytes:
            piece = scrap[: min(size_bytes, len(scrap))]
            self.receive_into(piece)
            size_bytes -= len(piece)

    def hung_up(self) -> bool:
        """Whether the peer has closed the connection, be there something of it left to read or not."""
        return _polled(self.sock, select.POLLRDHUP, 0.0)

    def close(self) -> None:
        """Close now; a thread blocked on the socket wakes with an error."""
        with suppress(OSError):  # not connected any more
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _send_buffers(self, buffers: Buffers) -> None:
        for start in range(0, len(buffers), IOV_MAX):
            group = list(buffers[start : start + IOV_MAX])
            while group:
                group = rest_of(group, self.sock.sendmsg(group))
                if group:
                    self._check_time()
            failpoint("wire.send.mid_payload")

    def _check_time(self) -> None:
        if time.monotonic() >= self.until_s:
            raise TimeoutError("a byte now and then does not extend the time of an exchange")


class Connection:
    """The calling side: requests go out, their replies come back in order, or the connection is closed.

    Not thread-safe; `ConnectionPool` hands each caller its own.

    Args:
        uri: ``tcp://host:port`` or ``unix:///path``.
        principal: Who is calling.
        timeout_s: Bound on connecting and greeting.

    Raises:
        UnavailableError: Nobody answers there in time.
        ProtocolError: Another protocol or version answers there.
    """

    def __init__(self, uri: str, principal: str, timeout_s: float) -> None:
        self.uri = uri
        self._correlation = 0
        self._posted: deque[int] = deque()
        until_s = time.monotonic() + timeout_s
        self._framed = FramedSocket(_dial(uri, timeout_s))
        try:
            left_s = max(0.0, until_s - time.monotonic())
            self.welcome = self.call(Hello(PROTOCOL_VERSION, principal), Welcome, left_s)
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
        return self.closed or _polled(self._framed.sock, select.POLLIN, timeout_s)

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
        if isinstance(error, OSError):
            raise UnavailableError(f"{self.uri} cannot be reached: {error}") from error


def _dial(uri: str, timeout_s: float) -> socket.socket:
    scheme, _, rest = uri.partition("://")
    try:
        if scheme == "unix":
            sock = _dial_unix(rest, timeout_s)
        elif scheme == "tcp":
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


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, with IPv6 hosts in brackets.

    Raises:
        SettingsError: No port, or not a number from 0 to 65535.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65_535:
        raise errors.SettingsError(f"{address!r} is not an address; write HOST:PORT, e.g. 127.0.0.1:7300")
    return host.strip("[]"), int(port)


def _polled(sock: socket.socket, events: int, timeout_s: float) -> bool:
    """Whether one of ``events``, or the end of the connection, comes in time."""
    poll = select.poll()  # unlike select(), takes descriptors of any number
    try:
        poll.register(sock, events)
    except ValueError:
        return True  # closed by another thread
    return bool(poll.poll(timeout_s * 1000))


def _remote_error(reply: ErrorReply) -> KvpoolError:
    kind = getattr(errors, reply.error, None)
    if isinstance(kind, type) and issubclass(kind, KvpoolError):
        return kind(reply.message)
    return KvpoolError(f"{reply.error}: {reply.message}")
