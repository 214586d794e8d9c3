"""Values for fields of messages that are of the right type and otherwise anything."""

from types import NoneType, UnionType
from typing import get_args, get_origin

import msgspec
from hypothesis import strategies as st

from kvpool.transport.wire.messages import Message

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
