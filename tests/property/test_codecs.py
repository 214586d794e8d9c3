"""Every decoder of bytes from outside: it gives what was encoded, or refuses with an error of ours; nothing else.

What decodes but lies is for `test_hostile`.
"""

import hashlib
import socket
import string
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.core.errors import InvalidNamespaceError, KvpoolError, ProtocolError, SettingsError, UsageError
from kvpool.core.grants import TAG_BYTES, Grant, open_grant, seal
from kvpool.core.keys import chain_hashes
from kvpool.core.limits import (
    FRAME_BODY_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    NAMESPACE_DOCUMENT_BYTES_MAX,
    PAGE_BYTES,
    RESERVE_BLOCKS_MAX,
)
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.core.slots import SlotState
from kvpool.core.units import parse_duration, parse_size
from kvpool.node.headers import RECORD_BYTES, HeaderFile, SlotHeaders, make_records, stored_segment_id
from kvpool.ops.tracing import TRACE_BYTES
from kvpool.transport.wire.connection import split_address
from kvpool.transport.wire.frame import DEADLINE_MS_MAX, HEADER_BYTES, Header, pack_header, parse_header
from kvpool.transport.wire.framed import FramedSocket
from kvpool.transport.wire.messages import KINDS, decode, encode

from .hostile_values import blobs, integers, plain, values_of

U32 = (1 << 32) - 1


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """``whole`` with bits turned, cut short, or with bytes put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(("flip", "cut", "insert", "set")))
        if change == "cut":
            del data[position:]
        elif change == "insert":
            data[position:position] = draw(st.binary(min_size=1, max_size=5))
        elif position < len(data):
            data[position] = (
                data[position] ^ draw(st.integers(1, 255)) if change == "flip" else draw(st.integers(0, 255))
            )
    return bytes(data)


messages = st.one_of(*map(values_of, KINDS.values()))


def attempt(read: Callable, *args: object, refusal: type[KvpoolError] = ProtocolError) -> Any:
    """What ``read`` gives, or None when it refuses with ``refusal``; whatever else it raises fails the test."""
    try:
        return read(*args)
    except refusal:
        return None


# Frames and messages

headers = st.builds(
    Header,
    st.integers(0, 0xFFFF),
    st.integers(0, U32),
    st.integers(0, DEADLINE_MS_MAX),
    st.integers(0, FRAME_BODY_BYTES_MAX),
    st.integers(0, FRAME_PAYLOAD_BYTES_MAX),
    st.sampled_from((0, TRACE_BYTES)),
)


@given(headers)
def test_headers_survive_the_way(header):
    assert parse_header(pack_header(header)) == header


@given(st.binary(max_size=2 * HEADER_BYTES) | headers.map(pack_header).flatmap(damaged))
def test_a_header_within_the_limits_is_parsed_or_refused(data):
    header = attempt(parse_header, data)
    if header is not None:
        assert header.body_bytes <= FRAME_BODY_BYTES_MAX
        assert header.payload_bytes <= FRAME_PAYLOAD_BYTES_MAX
        assert header.deadline_ms <= DEADLINE_MS_MAX
        assert pack_header(header) == data


@given(messages)
def test_messages_survive_the_way(message):
    assert decode(message.kind, encode(message)) == message


@given(
    st.sampled_from(tuple(KINDS)) | st.integers(0, 0xFFFF), st.binary(max_size=60) | plain.map(msgspec.msgpack.encode)
)
def test_any_body_is_that_message_or_refused(kind, body):
    message = attempt(decode, kind, body)
    assert message is None or type(message) is KINDS[kind]


@given(messages.flatmap(lambda message: st.tuples(st.just(message.kind), damaged(encode(message)))))
def test_a_damaged_body_is_a_message_or_refused(kind_and_body):
    kind, body = kind_and_body
    message = attempt(decode, kind, body)
    assert message is None or type(message) is KINDS[kind]


HUGE = [b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf"]
"""msgpack's markers for bytes, extensions, texts, arrays and maps whose length takes four bytes."""


@given(st.sampled_from(tuple(KINDS)), st.integers(0, 10), st.sampled_from(HUGE), st.integers(1 << 24, U32))
def test_lengths_that_a_body_only_announces_are_not_allocated(kind, field, marker, length):
    fields = [(field.name, field.type) for field in msgspec.structs.fields(KINDS[kind])]
    before = [msgspec.msgpack.encode({int: 1, str: "", bytes: b""}.get(t)) for _, t in fields[:field]]
    body = bytes([0x90 | len(fields)]) + b"".join(before) + marker + length.to_bytes(4, "big")

    with peak_below(64 << 10), pytest.raises(ProtocolError):
        decode(kind, body + bytes(16))


@given(headers, st.sampled_from(("body_bytes", "payload_bytes")), st.integers(0, U32 - FRAME_PAYLOAD_BYTES_MAX - 1))
def test_lengths_above_the_limits_are_refused_before_anything_is_received(header, field, above):
    limit = {"body_bytes": FRAME_BODY_BYTES_MAX, "payload_bytes": FRAME_PAYLOAD_BYTES_MAX}[field]
    near, far = socket.socketpair()
    with near, far:
        far.sendall(pack_header(header._replace(**{field: limit + 1 + above})))

        with peak_below(64 << 10), pytest.raises(ProtocolError, match=f"the limit is {limit}"):
            FramedSocket(near).receive_header()


@contextmanager
def peak_below(size_bytes: int):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


# Grants, documents, addresses, units

KEY = bytes(range(32))
HASHES = chain_hashes(range(5), 1)
GRANT = Grant(1, 2, 3, b"s" * 16, b"n" * 32, 100, 1000, HASHES[0], bytes(32), 0, b"", b"")
grants = st.builds(Grant, *[values_of(field.type) for field in msgspec.structs.fields(Grant)])


@given(blobs | damaged(seal(GRANT, KEY)))
def test_only_what_was_sealed_is_opened(sealed):
    if sealed == seal(GRANT, KEY):
        return
    with pytest.raises(ProtocolError):
        open_grant(sealed, KEY)


@given(blobs | plain.map(msgspec.msgpack.encode) | grants.map(lambda grant: seal(grant, KEY)[:-TAG_BYTES]))
def test_a_grant_that_was_sealed_is_sound_or_refused(body):
    sealed = body + hashlib.blake2b(body, key=KEY, digest_size=TAG_BYTES).digest()
    grant = attempt(open_grant, sealed, KEY)
    if grant is not None:
        assert 1 <= grant.count <= RESERVE_BLOCKS_MAX
        assert len(grant.hashes) == len(grant.parents) == 32 * grant.count
        assert all(slot >= 0 and generation >= 0 for slot, generation in grant.victims())
        assert seal(grant, KEY) == seal(open_grant(seal(grant, KEY), KEY), KEY)


NAMESPACE = Namespace(model="demo", block_tokens=1, block_bytes=PAGE_BYTES, shards=2, extra={"a": "b"})
fields = {field.name: field.type for field in msgspec.structs.fields(Namespace)}
documents = st.fixed_dictionaries(
    {"model": st.text(max_size=5), "block_tokens": integers, "block_bytes": integers},
    optional={
        name: st.dictionaries(st.text(max_size=3), st.text(max_size=3)) if name == "extra" else plain
        for name in fields.keys() - {"model", "block_tokens", "block_bytes"}
    },
)


@given(
    st.binary(max_size=60)
    | plain.map(msgspec.json.encode)
    | documents.map(msgspec.json.encode)
    | damaged(NAMESPACE.document)
)
@example(NAMESPACE.document)
@example(b'{"model":"m","block_tokens":1,"block_bytes":1,"epoch":%d}' % (1 << 200))
@example(b"[" * NAMESPACE_DOCUMENT_BYTES_MAX)
@example(b'{"model":"' + b"m" * (NAMESPACE_DOCUMENT_BYTES_MAX - 60) + b'","block_tokens":1,"block_bytes":1}')
def test_a_document_is_a_namespace_that_survives_the_way_or_refused(document):
    namespace = attempt(parse_namespace, document, refusal=InvalidNamespaceError)
    if namespace is not None:
        assert parse_namespace(namespace.document) == namespace
        assert parse_namespace(namespace.document).id == namespace.id


@given(st.text(max_size=30) | st.from_regex(r"\A.{0,8}:\d{0,7}\Z"))
@example("h:" + "9" * 5000)
def test_an_address_is_split_or_refused(text):
    address = attempt(split_address, text, refusal=SettingsError)
    if address is not None:
        host, port = address
        assert host == text.rpartition(":")[0].strip("[]")
        assert 0 <= port <= 65_535


numbers = st.from_regex(r"\A\s?\d{1,400}(\.\d{1,30})?\s?[A-Za-z]{0,3}\Z") | st.text(string.printable, max_size=12)


@given(numbers | st.integers() | st.floats() | st.booleans())
@example("9" * 5000)
@example(10**400)
def test_sizes_and_durations_are_numbers_or_refused(text):
    assert isinstance(attempt(parse_size, text, refusal=UsageError), int | None)
    assert isinstance(attempt(parse_duration, text, refusal=UsageError), float | None)


# Header files

SEGMENT_ID = b"s" * 16
PAGES = 8
PROLOGUE_BYTES = 64
FILE_BYTES = PROLOGUE_BYTES + PAGES * RECORD_BYTES
WRITTEN = SlotHeaders(
    np.arange(6, dtype=np.uint32),
    make_records(6, length=PAGE_BYTES, generation=range(6), hash=b"".join(HASHES[i % 5] for i in range(6)), checksum=7),
)
FIELDS = ["shard", "length", "generation", "namespace", "hash", "parent", "checksum"]


@given(
    st.lists(st.tuples(st.integers(0, FILE_BYTES - 1), st.integers(1, 255)), max_size=6),
    st.none() | st.integers(0, FILE_BYTES),
)
def test_a_damaged_header_file_describes_nothing_that_was_not_written(flips, kept):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "headers"
        file = HeaderFile(path, SEGMENT_ID, PAGES)
        file.write(WRITTEN, SlotState.COMMITTED)
        file.close()
        data = bytearray(path.read_bytes())
        for position, bits in flips:
            data[position] ^= bits
        path.write_bytes(data[:kept])

        assert stored_segment_id(path, PAGES) is None or len(data[:kept]) == FILE_BYTES
        with suppress(KvpoolError):
            file = HeaderFile(path, SEGMENT_ID, PAGES)
            file.drop_unsound()
            scanned = [file.scan(state) for state in SlotState]
            file.close()

            for found in scanned:
                assert found.records[FIELDS].tolist() == WRITTEN.records[found.pages][FIELDS].tolist()
            hit = {(position - PROLOGUE_BYTES) // RECORD_BYTES for position, _ in flips} if kept != 0 else set(range(6))
            assert {page for found in scanned for page in found.pages.tolist()} >= set(range(6)) - hit


@given(st.binary(min_size=PAGES * RECORD_BYTES, max_size=PAGES * RECORD_BYTES))
def test_a_header_file_of_noise_describes_nothing(noise):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "headers"
        HeaderFile(path, SEGMENT_ID, PAGES).close()
        path.write_bytes(path.read_bytes()[:PROLOGUE_BYTES] + noise)
        file = HeaderFile(path, SEGMENT_ID, PAGES)
        file.drop_unsound()

        assert [len(file.scan(state)) for state in SlotState] == [0, 0, 0]
        file.close()
