"""What anybody may say over gRPC: every unary call of every service, with fields that mean something, or are anything.

Each is answered or refused with an error of ours, takes no memory to speak of, and leaves the state sound. Calls are
found in the descriptors: one that is added is tried here by itself.
"""

import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import KvpoolError
from kvpool.core.grants import Grant, seal
from kvpool.meta.membership import MembershipServicer
from kvpool.meta.service import MetaService
from kvpool.meta.servicers import AdminServicer, DirectoryServicer
from kvpool.node.servicer import StoreNodeServicer
from kvpool.v1 import admin_pb2, common_pb2, directory_pb2, membership_pb2, store_node_pb2

from .hostile_values import HASHES, NAMESPACE, RESERVED, SEGMENTS, SMALL, TOO_MANY, U32, U64, UNKNOWN, blobs
from .test_hostile import Pool
from .test_hostile_node import KEY, SOUND, Node

GROWTH_BYTES_MAX = 1 << 20

META = [directory_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, membership_pb2.DESCRIPTOR]
METHODS = [
    method
    for file in (*META, store_node_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
    if not method.client_streaming
]

LIKELY = {
    "namespace": st.sampled_from((NAMESPACE.id, SMALL.id, UNKNOWN.id, b"", b"?" * 31)),
    "hash": st.sampled_from(HASHES),
    "hashes": st.integers(0, 5).map(lambda count: b"".join(HASHES[:count])) | st.sampled_from(TOO_MANY),
    "parent": st.sampled_from((b"", *HASHES)),
    "segment_id": st.sampled_from(SEGMENTS),
    "document": st.sampled_from((NAMESPACE.document, SMALL.document, UNKNOWN.document, b"{}", b"[" * 20_000)),
    "reservation": st.sampled_from((RESERVED, RESERVED + 1, 0)),
    "node_id": st.sampled_from(("n0", "n1", "", "n" * 200)),
    "model": st.sampled_from(("demo", "small", "")),
    "grant": st.just(seal(Grant(**SOUND), KEY)),
    "limit_ms": st.just(1),
    "tenant": st.sampled_from((NAMESPACE.tenant, "other", "", "t" * 300)),
    "unlimited": st.sampled_from(("bytes", "pins", "lookups_per_s", "writes_per_s", "share", "")),
}
TYPES = {
    FieldDescriptor.TYPE_BYTES: blobs,
    FieldDescriptor.TYPE_STRING: st.text(max_size=12),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 9) | st.sampled_from((1 << 31, U32)),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 9) | st.sampled_from((1 << 63, U64)),
    FieldDescriptor.TYPE_DOUBLE: st.floats() | st.sampled_from((0.5, 1.0, 1e9)),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 9) | st.sampled_from((1 << 31, 1 << 63, U64)),
}


@st.composite
def requests(draw: st.DrawFn, method: MethodDescriptor) -> Message:
    """A request of ``method``, whose every field is likely, or anything, or left out."""
    request = GetMessageClass(method.input_type)()
    for field in method.input_type.fields:
        anything = TYPES[field.type]
        value = LIKELY.get(field.name, anything)
        if not field.is_repeated:
            chosen = draw(st.one_of(value, value, anything, st.none()))
            if chosen is not None:
                setattr(request, field.name, chosen)
        else:
            getattr(request, field.name).extend(draw(st.lists(value, max_size=4)))
    return request


class Context:
    """Of a caller; a servicer that aborts raises."""

    def peer(self) -> str:
        return "hostile"


def ask(servicer: object, method: MethodDescriptor, request: Message) -> Message | None:
    """The answer, or None for a refusal; neither may take memory, whatever lengths are named."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        answer = getattr(servicer, method.name)(request, Context())
    except KvpoolError:
        answer = None
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < GROWTH_BYTES_MAX + 2 * request.ByteSize(), f"{method.full_name} took {peak - before} bytes"
    return answer


def store_node(stack: ExitStack) -> tuple[object, Callable[[], None]]:
    """The servicer of a node with some blocks, and what looks whether it is sound."""
    node = Node(stack)
    return StoreNodeServicer(node.store, common_pb2.Node, lambda: 0, dict, lambda: None), node.check


def of_pool(make: Callable[[MetaService], object], stack: ExitStack) -> tuple[object, Callable[[], None]]:
    """A servicer of a metadata service with two nodes and some blocks, and what looks whether it is sound."""
    pool = Pool()
    stack.callback(pool.check)
    return make(pool.service), pool.service.check_integrity


SERVICERS = {
    "Directory": partial(of_pool, lambda service: DirectoryServicer(service, ["tcp://127.0.0.1:1"], "1")),
    "Admin": partial(of_pool, lambda service: AdminServicer(service, "1", dict)),
    "Membership": partial(of_pool, MembershipServicer),
    "StoreNode": store_node,
}


@pytest.fixture(scope="module", autouse=True)
def traced():
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name.removeprefix("kvpool.v1."))
@settings(max_examples=25)
@given(data=st.data())
def test_every_call_is_answered_or_refused_and_leaves_the_state_sound(method, data):
    with ExitStack() as stack:
        servicer, check = SERVICERS[method.containing_service.name](stack)
        for _ in range(6):
            answer = ask(servicer, method, data.draw(requests(method)))
            assert answer is None or answer.DESCRIPTOR is method.output_type
            check()
