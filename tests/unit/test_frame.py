"""Frame headers: 32 bytes that survive the way, and refusals that come before anything is read or allocated."""

import struct

import pytest

from kvpool.core.errors import ProtocolError
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX
from kvpool.ops.tracing import TRACE_BYTES
from kvpool.transport.wire.frame import DEADLINE_MS_MAX, HEADER_BYTES, MAGIC, Header, pack_header, parse_header

HEADER = Header(kind=10, correlation=7, deadline_ms=1500, body_bytes=3, payload_bytes=4096)


def test_a_header_has_the_documented_layout():
    packed = pack_header(HEADER)

    assert HEADER_BYTES == len(packed) == 32
    assert b"KVP1" == MAGIC == packed[:4]
    assert struct.unpack("<HH", packed[4:8]) == (10, 0)
    assert struct.unpack("<III", packed[8:20]) == (7, 1500, 3)
    assert struct.unpack("<I", packed[20:24]) == (0,)
    assert struct.unpack("<Q", packed[24:]) == (4096,)


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_a_parsed_header_is_the_one_that_was_packed(container):
    assert parse_header(container(pack_header(HEADER))) == HEADER


def test_the_largest_lengths_allowed_are_accepted():
    largest = Header(0xFFFF, 0xFFFF_FFFF, DEADLINE_MS_MAX, FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX)

    assert parse_header(pack_header(largest)) == largest


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"body_bytes": FRAME_BODY_BYTES_MAX + 1}, f"frame body of {FRAME_BODY_BYTES_MAX + 1} bytes"),
        ({"body_bytes": 0xFFFF_FFFF}, "frame body of 4294967295 bytes"),
        ({"payload_bytes": FRAME_PAYLOAD_BYTES_MAX + 1}, f"the limit is {FRAME_PAYLOAD_BYTES_MAX}"),
        ({"payload_bytes": (1 << 64) - 1}, "frame payload of 18446744073709551615 bytes"),
        ({"deadline_ms": DEADLINE_MS_MAX + 1}, f"the limit is {DEADLINE_MS_MAX}"),
    ],
)
def test_a_length_above_its_limit_is_refused_with_both(change, shown):
    with pytest.raises(ProtocolError, match=shown):
        parse_header(pack_header(HEADER._replace(**change)))


@pytest.mark.parametrize("size_bytes", [1, TRACE_BYTES - 1, TRACE_BYTES + 1, 0xFFFF_FFFF])
def test_a_trace_context_of_another_length_is_refused(size_bytes):
    with pytest.raises(ProtocolError, match=f"trace context of {size_bytes} bytes"):
        parse_header(pack_header(HEADER._replace(trace_bytes=size_bytes)))


@pytest.mark.parametrize("size_bytes", [0, 1, 31, 33])
def test_a_header_of_another_length_is_refused(size_bytes):
    with pytest.raises(ProtocolError, match=f"frame header of {size_bytes} bytes"):
        parse_header(bytes(size_bytes))


def test_another_protocol_is_told_apart():
    with pytest.raises(ProtocolError, match="not kvpool's framed port"):
        parse_header(b"GET / HTTP/1.1\r\nHost: example.org"[:HEADER_BYTES])


@pytest.mark.parametrize("offset", [6, 7])
def test_reserved_bits_are_refused(offset):
    packed = bytearray(pack_header(HEADER))
    packed[offset] = 1

    with pytest.raises(ProtocolError, match="newer protocol"):
        parse_header(packed)
