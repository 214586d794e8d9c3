"""Messages that decode and lie: fields of the right type that mean something to a small pool, or are anything."""

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import get_args, get_origin

import msgspec
from hypothesis import strategies as st

from kvpool.core.errors import KvpoolError
from kvpool.core.keys import chain_hashes
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, MATCH_BLOCKS_MAX, PAGE_BYTES, RESERVE_BLOCKS_MAX
from kvpool.core.namespace import Namespace
from kvpool.transport.wire.messages import KINDS, Message, decode, encode, pack
from kvpool.transport.wire.payload import Payload
from kvpool.transport.wire.server import Session

U32, U64 = (1 << 32) - 1, (1 << 64) - 1

edges = st.sampled_from((-(1 << 63), -(1 << 31) - 1, U32 - 1, U32, U32 + 1, (1 << 63) - 1, 1 << 63, U64))
integers = st.integers(-3, 9) | edges | st.integers(-(1 << 63), U64)
blobs = st.binary(max_size=80) | st.sampled_from((bytes(31), bytes(32), bytes(33), bytes(16)))
plain = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | blobs | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def values_of(kind: type) -> st.SearchStrategy:
    """Values of a message field's type."""
    if isinstance(kind, UnionType):
        return st.one_of(*map(values_of, get_args(kind)))
    if get_origin(kind) is list:
        return st.lists(values_of(get_args(kind)[0]), max_size=3)
    if issubclass(kind, Message):
        return st.builds(kind, *[values_of(field.type) for field in msgspec.structs.fields(kind)])
    return {bool: st.booleans(), int: integers, bytes: blobs, str: st.text(max_size=12), NoneType: st.none()}[kind]


HASHES = chain_hashes(range(5), 1)
NAMESPACE = Namespace(model="demo", block_tokens=1, block_bytes=PAGE_BYTES, shards=2)
SMALL = Namespace(model="small", block_tokens=1, block_bytes=1)
UNKNOWN = Namespace(model="unknown", block_tokens=1, block_bytes=1)
SEGMENTS = (b"0" * 16, b"1" * 16)
RESERVED = 3
"""A reservation that is open when the lying begins; the one after it is of another namespace, or of nobody."""
TOO_MANY = (bytes(32) * (RESERVE_BLOCKS_MAX + 1), bytes(32) * (MATCH_BLOCKS_MAX + 1))
DTYPES = {"shards": "<u2", "slots": "<u4", "generations": "<u8", "checksums": "<u8"}
DTYPES |= {"victim_slots": "<u4", "victim_generations": "<u8"}

chains = st.sampled_from(HASHES)
small = st.sampled_from((0, 1, 2, 3, 4, 7, U32))
numbers_32 = small | st.integers(0, U32)
numbers_64 = small | st.integers(0, U64)


def columns(count: int, elements: st.SearchStrategy) -> st.SearchStrategy:
    """``count`` elements; now and then another number of them."""
    return st.lists(elements, min_size=count, max_size=count) | st.lists(elements, max_size=4)


def plausible(
    name: str, first: int, count: int, sessions: list[int], otherwise: st.SearchStrategy, *, honest: bool
) -> st.SearchStrategy:
    """Values of field ``name`` in a message about ``count`` blocks or slots from ``first`` on.

    Slot i of a fresh node has generation i + 1.
    """
    if name in DTYPES:
        rising = range(first + (name == "generations"), first + count + (name == "generations"))
        width = (1 << 8 * int(DTYPES[name][-1])) - 1
        chosen = st.lists(small, min_size=count, max_size=count).map(lambda items: [min(i, width) for i in items])
        likely = st.just([0] * count) | st.just([1] * count) if name == "shards" else st.just(rising)
        return (likely if honest else likely | chosen).map(lambda items: pack(list(items), DTYPES[name]))
    many = {"hashes": chains, "parents": chains | st.just(bytes(32))}
    if name in many:
        chosen = st.lists(many[name], min_size=count, max_size=count)
        likely = st.just(HASHES[:count]) | st.just(HASHES[first : first + count])
        return (likely if honest else likely | chosen).map(b"".join)
    one = {
        "namespace": st.sampled_from((NAMESPACE.id, SMALL.id, UNKNOWN.id)),
        "hash": chains,
        "parent": st.just(b"") | chains,
        "session": st.sampled_from(sessions),
        "segment_id": st.sampled_from((SEGMENTS[0], SEGMENTS[0], SEGMENTS[1])),
        "first": st.integers(0, max(0, count - 1)),
        "reservation": st.sampled_from((RESERVED, RESERVED, RESERVED + 1, 0)),
        "shard": st.integers(-1, 2),
        "block_bytes": st.sampled_from((1, PAGE_BYTES, PAGE_BYTES + 1)),
    }
    return one.get(name, otherwise)


@st.composite
def lying(draw, kind: type, sessions: list[int]) -> msgspec.Struct:
    """A message or grant whose every field may mean something, or lie."""
    first, count, honest = draw(st.sampled_from((0, 2, 0, 2, 1, 3))), draw(st.integers(0, 4)), draw(st.booleans())
    values = []
    for field in msgspec.structs.fields(kind):
        lies = values_of(field.type)
        if field.name == "hashes":
            lies |= st.sampled_from(TOO_MANY)
        otherwise = st.integers(0, 4) if field.type is int else lies
        likely = plausible(field.name, first, count, sessions, otherwise, honest=honest)
        values.append(draw(likely if honest or draw(st.integers(0, 3)) else lies))
    return kind(*values)


def any_of(kinds: Iterable[type[Message]], sessions: list[int]) -> st.SearchStrategy[Message]:
    """Mostly what a service of these kinds is asked, now and then what it is not."""
    wanted = st.sampled_from(tuple(kinds)).flatmap(lambda kind: lying(kind, sessions))
    return wanted | wanted | wanted | st.sampled_from(tuple(KINDS.values())).flatmap(lambda kind: lying(kind, sessions))


def answer(session: Session, request: Message, payload: Payload) -> Message | KvpoolError:
    """What a server answers, or refuses with."""
    request = decode(request.kind, encode(request))
    try:
        reply = session.handle(request, payload)
    except KvpoolError as error:
        return error
    if reply.sent is not None:
        reply.sent()
    assert len(encode(reply.message)) <= FRAME_BODY_BYTES_MAX
    return reply.message
