"""Whole frames over a blocking socket: exact reads, gathered writes, a time limit for each exchange."""

import math
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from kvpool.core.errors import CapacityError
from kvpool.core.limits import FRAME_BODY_BYTES_MAX
from kvpool.core.principals import Principal
from kvpool.ops.failpoints import failpoint
from kvpool.ops.tracing import carried
from kvpool.transport.blocks import rest_of
from kvpool.transport.wire.frame import HEADER_BYTES, Header, pack_header, parse_header
from kvpool.transport.wire.messages import Message, decode, encode

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


class FramedSocket:
    """Sends and receives whole frames. Owns the socket.

    Attributes:
        sock: The socket.
        identities: Whom the peer has proven to be: none, without TLS.
        caller: Who the peer, being a caller, is; None before it has said Hello.
        trace: The trace context of the message that was received last; empty without one.
    """

    identities: tuple[str, ...] = ()

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.until_s = math.inf
        """When the exchange at hand must be over; looked at when a system call did less than it was asked for."""
        self._armed_s = -1.0
        self.caller: Principal | None = None
        self.trace = ""
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
        trace = carried().encode()
        header = pack_header(Header(message.kind, correlation, deadline_ms, len(body), payload_bytes, len(trace)))
        if payload:
            self._send_buffers([memoryview(header + trace + body), *payload])
        else:
            self._send_all(header + trace + body)

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
            count = self._receive_some(memoryview(header))
        except (BlockingIOError, TimeoutError):
            return None
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        if count < HEADER_BYTES:
            self._check_time()
            self.receive_into(memoryview(header)[count:])
        return parse_header(header)

    def receive_body(self, header: Header) -> Message:
        """The message of the frame whose header was just received; its trace context is in `trace`."""
        self.trace = self._receive_trace(header.trace_bytes) if header.trace_bytes else ""
        try:
            body = bytearray(header.body_bytes)
        except MemoryError:
            self.drain(header.body_bytes)  # the next frame can be read, when there is memory for it
            raise
        self.receive_into(memoryview(body))
        return decode(header.kind, body)

    def _receive_trace(self, size_bytes: int) -> str:
        trace = bytearray(size_bytes)
        self.receive_into(memoryview(trace))
        return trace.decode("ascii", errors="replace")

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` from the stream."""
        received = 0
        while received < len(view):
            count = self._receive_some(view[received:])
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
                count = self._scatter_some(group)
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

    def readable(self, timeout_s: float) -> bool:
        """Whether something has arrived, or the peer has gone, within ``timeout_s``."""
        return _polled(self.sock, select.POLLIN, timeout_s)

    def close(self) -> None:
        """Close now; a thread blocked on the socket wakes with an error."""
        with suppress(OSError):  # not connected any more
            self._hang_up()
        self.sock.close()

    def _hang_up(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)

    def _send_buffers(self, buffers: Buffers) -> None:
        for start in range(0, len(buffers), IOV_MAX):
            group = list(buffers[start : start + IOV_MAX])
            while group:
                group = rest_of(group, self._send_some(group))
                if group:
                    self._check_time()
            failpoint("wire.send.mid_payload")

    def _receive_some(self, view: memoryview) -> int:
        return self.sock.recv_into(view, 0, socket.MSG_WAITALL)

    def _scatter_some(self, group: list[memoryview]) -> int:
        return self.sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]

    def _send_some(self, group: list[memoryview]) -> int:
        return self.sock.sendmsg(group)

    def _send_all(self, data: bytes) -> None:
        self.sock.sendall(data)

    def _check_time(self) -> None:
        if time.monotonic() >= self.until_s:
            raise TimeoutError("a byte now and then does not extend the time of an exchange")


def _polled(sock: socket.socket, events: int, timeout_s: float) -> bool:
    """Whether one of ``events``, or the end of the connection, comes in time."""
    poll = select.poll()  # unlike select(), takes descriptors of any number
    try:
        poll.register(sock, events)
    except ValueError:
        return True  # closed by another thread
    return bool(poll.poll(timeout_s * 1000))
