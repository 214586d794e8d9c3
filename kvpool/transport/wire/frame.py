"""Frames: what travels on a framed connection.

A frame is a 32-byte header, a body, and an optional payload. Header, little-endian:

    offset  size  field
    0       4     magic, b"KVP1"
    4       2     kind: which message the body is (`messages.KINDS`)
    6       2     reserved, zero
    8       4     correlation: chosen by the caller, repeated in the reply
    12      4     deadline_ms: what is left of the caller's time; zero in replies
    16      4     body_bytes
    20      4     trace_bytes: a trace context follows the header, or, with zero, does not
    24      8     payload_bytes

A trace context is W3C's ``traceparent``: of which step of whose request the call is part (`ops.tracing`). It is there
only while the caller records that step.

The body is one msgpack array (`messages`); the payload is raw block bytes whose division the body gives. Lengths are
checked against `core.limits` before anything is read or allocated.
"""

import struct
from typing import NamedTuple

from kvpool.core.errors import ProtocolError
from kvpool.core.limits import DEADLINE_S_MAX, FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from kvpool.ops.tracing import TRACE_BYTES

MAGIC = b"KVP1"
_TLS_HANDSHAKE = b"\x16\x03"
_HEADER = struct.Struct("<4sHHIIIIQ")
HEADER_BYTES = _HEADER.size
DEADLINE_MS_MAX = int(DEADLINE_S_MAX * 1000)


class Header(NamedTuple):
    """A frame's header, checked."""

    kind: int
    correlation: int
    deadline_ms: int
    body_bytes: int
    payload_bytes: int
    trace_bytes: int = 0


def pack_header(header: Header) -> bytes:
    """The header as 32 bytes."""
    kind, correlation, deadline_ms, body_bytes, payload_bytes, trace_bytes = header
    return _HEADER.pack(MAGIC, kind, 0, correlation, deadline_ms, body_bytes, trace_bytes, payload_bytes)


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in ``data``.

    Raises:
        ProtocolError: Wrong length or magic, reserved bits set, or a length above its limit.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(data)} bytes; it has {HEADER_BYTES}")
    magic, kind, zero, correlation, deadline_ms, body_bytes, trace_bytes, payload_bytes = _HEADER.unpack(data)
    if magic.startswith(_TLS_HANDSHAKE):
        raise ProtocolError("a TLS handshake, on a port without TLS: give this process certificates, or the peer none")
    if magic != MAGIC:
        raise ProtocolError(f"frame begins with {magic!r}, not {MAGIC!r}: this is not kvpool's framed port")
    if zero:
        raise ProtocolError("frame with reserved bits set: the peer speaks a newer protocol")
    if trace_bytes not in (0, TRACE_BYTES):
        raise ProtocolError(f"trace context of {trace_bytes} bytes; it has {TRACE_BYTES}, or there is none")
    if body_bytes > FRAME_BODY_BYTES_MAX:
        raise ProtocolError(f"frame body of {body_bytes} bytes; the limit is {FRAME_BODY_BYTES_MAX}")
    if payload_bytes > FRAME_PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"frame payload of {payload_bytes} bytes; the limit is {FRAME_PAYLOAD_BYTES_MAX}")
    if deadline_ms > DEADLINE_MS_MAX:
        raise ProtocolError(f"deadline of {deadline_ms} ms; the limit is {DEADLINE_MS_MAX}")
    return Header(kind, correlation, deadline_ms, body_bytes, payload_bytes, trace_bytes)
