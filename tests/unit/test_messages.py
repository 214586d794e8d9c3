"""Messages: closed, typed arrays; what is not exactly one of them is refused."""

import msgspec
import numpy as np
import pytest

from kvpool.core.errors import ProtocolError
from kvpool.transport import cuda
from kvpool.transport.ucx import messages as ucx_messages
from kvpool.transport.wire import messages
from kvpool.transport.wire.messages import (
    KINDS,
    Hello,
    LocateReply,
    MatchRequest,
    Message,
    NodeInfo,
    Ping,
    ReserveReply,
    SegmentGrant,
    SegmentInfo,
    Topology,
    decode,
    encode,
    pack,
    unpack,
)

NODE = NodeInfo("n0", 1, "ready", ["tcp://127.0.0.1:1"], [SegmentInfo(0, bytes(16), "shm", 4096)])
NESTED = [
    LocateReply(1, "", b"", b"", b"", b"", b"", b"", Topology(3, [NODE])),
    LocateReply(0, "cold", b"", b"", b"", b"", b"", b"", None),
    ReserveReply(1, b"\0", -2, [SegmentGrant(0, 0, b"\0\0\0\0", b"sealed")], None),
]


def test_every_kind_has_its_own_number_and_replies_are_odd():
    defined = [value for module in (messages, ucx_messages, cuda) for value in vars(module).values()]
    named = {cls for cls in defined if isinstance(cls, type) and issubclass(cls, Message) and cls.kind}
    replies = {cls.__name__ for cls in named if cls.kind % 2}

    assert set(KINDS.values()) == named
    assert len({cls.kind for cls in named}) == len(named)
    assert {"Welcome", "ErrorReply", "Done", "Statuses", "Region"} | {
        n for n in replies if n.endswith("Reply")
    } == replies


@pytest.mark.parametrize("message", [Ping(), Hello(1, "me"), MatchRequest(bytes(32), bytes(64), 1, 0), *NESTED])
def test_a_decoded_message_is_the_one_that_was_encoded(message):
    assert decode(message.kind, encode(message)) == message


def test_messages_travel_as_plain_arrays_without_names():
    assert msgspec.msgpack.decode(encode(Hello(1, "me"))) == [1, "me", ""]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ProtocolError, match="kind 999 is not known"):
        decode(999, encode(Ping()))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        encode(Hello(1, "me"))[:-1],
        encode(Hello(1, "me")) + b"\0",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode([1, "me", "token", "more"]),
        msgspec.msgpack.encode(["1", "me"]),
        msgspec.msgpack.encode([1, b"me"]),
        msgspec.msgpack.encode([1.0, "me"]),
        msgspec.msgpack.encode({"version": 1, "principal": "me"}),
        b"\x92\x01\xa2\xff\xfe",
        b"\x92\x01\xdb\xff\xff\xff\xff",
        b"\x92\xd4\x01\x00\xa2me",
        b"\x91" * 5000,
    ],
    ids=[
        "empty", "reserved byte", "cut short", "trailing byte", "field missing", "field too many", "text for a number",
        "bytes for text", "fraction", "map", "not UTF-8", "text of 4 GiB", "extension", "nested",
    ],
)  # fmt: skip
def test_a_body_that_is_not_exactly_the_message_is_refused(body):
    with pytest.raises(ProtocolError, match="Hello cannot be read"):
        decode(Hello.kind, body)


def test_packed_arrays_are_little_endian():
    assert pack([1, 258], "<u4") == b"\1\0\0\0\2\1\0\0"
    assert unpack("slots", b"\1\0\0\0\2\1\0\0", "<u4", 2).tolist() == [1, 258]


def test_unpacked_arrays_cannot_be_written():
    assert not unpack("slots", bytes(8), "<u4", 2).flags.writeable


@pytest.mark.parametrize("size_bytes", [0, 7, 9, 16])
def test_an_array_of_another_length_is_refused(size_bytes):
    with pytest.raises(ProtocolError, match=f"slots has {size_bytes} bytes; 2 elements need 8"):
        unpack("slots", bytes(size_bytes), "<u4", 2)


def test_values_that_do_not_fit_are_not_packed():
    with pytest.raises(OverflowError):
        pack([1 << 32], "<u4")
    assert pack(np.array([(1 << 64) - 1], np.uint64), "<u8") == b"\xff" * 8
