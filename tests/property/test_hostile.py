"""Messages that decode but lie: wrong lengths and counts, numbers out of range, names of what belongs to others.

The services answer or refuse with an error of ours, and are sound afterwards.
"""

import itertools
import logging
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpool.core.directory import CommitStatus
from kvpool.core.errors import KvpoolError, ProtocolError
from kvpool.core.grants import Grant, seal
from kvpool.core.keys import chain_hashes
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, MATCH_BLOCKS_MAX, PAGE_BYTES, RESERVE_BLOCKS_MAX
from kvpool.core.members import MemberSegment
from kvpool.core.namespace import Namespace
from kvpool.core.slots import Slots, SlotState
from kvpool.meta.framed import MetaSession
from kvpool.meta.membership import MembershipServicer, _Stream
from kvpool.meta.service import MetaService
from kvpool.node.headers import HeaderFile
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.segment import ShmSegment
from kvpool.node.serving import DataSession
from kvpool.node.store import NodeSession, NodeStore
from kvpool.ops.settings import MetaSettings
from kvpool.testing import ManualClock
from kvpool.transport.wire.connection import FramedSocket
from kvpool.transport.wire.messages import KINDS, Message, WriteRequest, decode, encode, pack
from kvpool.transport.wire.server import Payload, Session
from kvpool.v1 import common_pb2, membership_pb2

from .hostile_values import U32, U64, values_of

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


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Thousands of nodes join and leave here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


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


# The metadata service


class Pool:
    """A metadata service with two nodes and some blocks."""

    def __init__(self) -> None:
        numbers = itertools.count(2, 2)
        self.clock = ManualClock()
        settings = MetaSettings(tombstones=4)
        self.service = MetaService(settings, self.clock, lambda count: next(numbers).to_bytes(count, "little"))
        for namespace in (NAMESPACE, SMALL):
            self.service.open_namespace(namespace.document)
        self.members = [
            self.service.join(f"n{i}", 1, (), (MemberSegment(segment, "shm", 6 * PAGE_BYTES),))
            for i, segment in enumerate(SEGMENTS)
        ]
        self.sessions = [member.session for member in self.members]
        for member in self.members:
            self.service.ready(member)
        for namespace in (NAMESPACE, SMALL):
            assert set(self.store(namespace, HASHES[:2])) == {CommitStatus.COMMITTED}
        for namespace in (NAMESPACE, SMALL):
            self.service.reserve(namespace.id, b"".join(HASHES[:4]), 2, b"", "writer", 0.0)

    def store(self, namespace: Namespace, hashes: list[bytes]) -> Iterator[CommitStatus]:
        reserved = self.service.reserve(namespace.id, b"".join(hashes), 0, b"", "writer", 0.0)
        for (number, shard), share in reserved.result.shares.items():
            written = [(hashes[i], shard, i, number + 1, 9) for i in share.indexes]
            member = next(member for member in self.members if number in member.numbers)
            segment_id = member.segments[0].segment_id
            yield from self.service.commit(member.session, segment_id, reserved.result.reservation, written)

    def check(self) -> None:
        """The service is sound, and gives up everything with its nodes."""
        self.service.check_integrity()
        for member in self.members:
            self.service.leave(member)
        self.service.check_integrity()
        assert self.service.status().stats.used_bytes == 0


@given(st.data())
def test_the_metadata_service_answers_or_refuses_whatever_a_client_or_node_says(data):
    pool = Pool()
    session = MetaSession(pool.service)
    anything = any_of((kind for kind in KINDS.values() if kind.kind % 2 == 0 and kind.kind < 30), pool.sessions)

    for _ in range(data.draw(st.integers(1, 12))):
        answer(session, data.draw(anything), Payload(None, 0))
        pool.service.check_integrity()
        if data.draw(st.integers(0, 3)) == 0:
            pool.clock.advance(31.0)

    pool.check()


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_the_metadata_service_takes_no_block_bytes(kind):
    request = kind(*[{int: 0, bytes: b"", str: "", list: []}.get(f.type) for f in msgspec.structs.fields(kind)])

    with pytest.raises(ProtocolError, match="is not for this service"):
        MetaSession(Pool().service).handle(request, Payload(None, 1))


# Inventories and control streams


@st.composite
def inventories(draw) -> membership_pb2.Inventory:
    count = draw(st.integers(0, 4))
    parents = draw(columns(count, chains | st.just(bytes(32))).map(b"".join))
    return membership_pb2.Inventory(
        segment_id=draw(st.sampled_from((*SEGMENTS, b"", b"x" * 16))),
        document=draw(st.sampled_from((NAMESPACE.document, SMALL.document, UNKNOWN.document, b"", b"{}"))),
        namespace=draw(st.binary(max_size=32)),
        hashes=draw(columns(count, chains).map(b"".join) | st.binary(max_size=70) | st.sampled_from(TOO_MANY)),
        parents=parents + draw(st.sampled_from((b"", b"", b"", b"?"))),
        shard=draw(columns(count, numbers_32)),
        slot=draw(columns(count, numbers_32)),
        generation=draw(columns(count, numbers_64)),
        checksum=draw(columns(count, numbers_64)),
        age_s=draw(columns(count, st.sampled_from((0.0, 1.0)) | st.floats(width=32))),
    )


segments = st.builds(
    common_pb2.Segment,
    number=numbers_32,
    segment_id=st.sampled_from((*SEGMENTS, b"2" * 16, b"short")),
    medium=st.text(max_size=5),
    capacity_bytes=st.sampled_from((0, 1, PAGE_BYTES, U64)),
)
hellos = st.builds(
    membership_pb2.NodeHello,
    node_id=st.sampled_from(("n0", "n1", "n2", "", "n" * 129)),
    incarnation=numbers_64,
    endpoints=st.lists(st.text(max_size=5), max_size=17),
    segments=st.lists(segments, max_size=3),
)
heartbeats = st.builds(membership_pb2.Heartbeat, orders_applied=numbers_64, segments=st.lists(segments, max_size=1))
events = st.one_of(
    inventories().map(lambda part: membership_pb2.FromNode(inventory=part)),
    hellos.map(lambda hello: membership_pb2.FromNode(hello=hello)),
    heartbeats.map(lambda heartbeat: membership_pb2.FromNode(heartbeat=heartbeat)),
    numbers_64.map(lambda number: membership_pb2.FromNode(inventory_done={"orders_applied": number})),
    st.just(membership_pb2.FromNode(draining=membership_pb2.NodeDraining())),
    st.just(membership_pb2.FromNode()),
)


@given(st.lists(events, min_size=1, max_size=6))
def test_a_node_may_say_anything_on_its_control_stream(said):
    pool = Pool()
    stream = _Stream(pool.service, pool.members[0])

    for event in said:
        with suppress(KvpoolError):
            stream._take(event)
        pool.service.check_integrity()

    pool.check()


@given(st.lists(inventories(), min_size=1, max_size=6))
def test_an_inventory_never_touches_the_blocks_of_other_nodes(parts):
    pool = Pool()
    stream = _Stream(pool.service, pool.members[0])
    before = pool.service.status().used[pool.members[1].numbers[0]]

    for part in parts:
        with suppress(KvpoolError):
            stream._take(membership_pb2.FromNode(inventory=part))

    assert pool.service.status().used[pool.members[1].numbers[0]] == before
    pool.check()


@given(st.lists(hellos, max_size=4))
def test_a_node_that_joins_never_takes_the_blocks_of_another(said):
    pool = Pool()
    servicer = MembershipServicer(pool.service)
    before = pool.service.status().used[pool.members[1].numbers[0]]

    for hello in said:
        if hello.node_id == "n1":
            continue
        with suppress(KvpoolError):
            pool.members.append(servicer._join(iter([membership_pb2.FromNode(hello=hello)])))
        pool.service.check_integrity()

    assert pool.service.status().used[pool.members[1].numbers[0]] == before
    pool.check()


@given(st.data())
def test_a_commit_over_grpc_is_answered_or_refused(data):
    pool = Pool()
    servicer = MembershipServicer(pool.service)
    reservation = pool.service.reserve(SMALL.id, b"".join(HASHES[:4]), 2, b"", "writer", 0.0).result.reservation
    count = data.draw(st.integers(0, 4))
    request = membership_pb2.CommitRequest(
        session=data.draw(st.sampled_from(pool.sessions) | numbers_64),
        segment_id=data.draw(st.sampled_from(SEGMENTS)),
        reservation=data.draw(st.sampled_from((reservation, 0))),
        hashes=data.draw(columns(count, chains).map(b"".join) | st.binary(max_size=70)),
        shard=data.draw(columns(count, numbers_32)),
        slot=data.draw(columns(count, numbers_32)),
        generation=data.draw(columns(count, numbers_64)),
        checksum=data.draw(columns(count, numbers_64)),
    )

    with suppress(KvpoolError):
        assert len(servicer.Commit(request, None).statuses) == len(request.slot)

    pool.check()


# Store nodes

KEY = b"k" * 32
PAGES = 6
SOUND = {"incarnation": 1, "session": 2, "reservation": RESERVED, "segment_id": SEGMENTS[0], "shard": 0}
SOUND |= {"namespace": NAMESPACE.id}
SOUND |= {"block_bytes": PAGE_BYTES, "ttl_ms": 1000, "hashes": HASHES[0] + HASHES[1], "parents": bytes(64)}
SOUND |= {"victim_slots": b"", "victim_generations": b""}
"""A grant for two blocks that the node takes."""


class Directory:
    """Takes every commit, as long as it is asked properly."""

    def commit(self, segment_id, reservation, headers) -> NDArray[np.uint8]:
        return np.full(len(headers), CommitStatus.STALE if reservation == 4 else CommitStatus.COMMITTED, np.uint8)

    def abort(self, reservation, hashes) -> None:
        assert hashes

    def describe(self, namespace_id) -> bytes:
        if namespace_id == UNKNOWN.id:
            raise KvpoolError("not open")
        return NAMESPACE.document


class Node:
    """A store node without its wires: two connections, a local one and one over the network."""

    def __init__(self, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        segment = ShmSegment(directory / "payload", SEGMENTS[0], PAGES * PAGE_BYTES, "off")
        stack.callback(segment.close)
        self.headers = HeaderFile(directory / "headers", SEGMENTS[0], PAGES)
        stack.callback(self.headers.close)
        self.clock = ManualClock()
        self.slots = Slots(PAGES, self.clock)
        book = NamespaceBook(directory / "namespaces", Directory().describe)
        self.store = NodeStore(segment, self.headers, self.slots, book, Directory(), 1)
        self.store.session = NodeSession(1, 2, KEY)
        self.sessions = [DataSession(self.store, owner=i, local=not i) for i in range(2)]
        near, self.far = socket.socketpair()
        stack.enter_context(near)
        stack.enter_context(self.far)
        self.framed = FramedSocket(near)
        self.prepare(owner=0)
        slots, generations = self.prepare(owner=1)
        self.store.seal(SEGMENTS[0], RESERVED, 1, slots, generations, np.zeros(len(slots), np.uint64))

    def prepare(self, owner: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        grant = Grant(**SOUND)
        return self.store.prepare(seal(grant, KEY), owner)

    def ask(self, session: DataSession, request: Message, payload: bytes) -> None:
        self.far.sendall(payload)
        left = Payload(self.framed, len(payload))
        if isinstance(answer(session, request, left), ProtocolError):
            session.closed()
        left.drop()

    def check(self) -> None:
        """Slots and headers agree, and no transfer holds a slot."""
        self.slots.check_integrity()
        assert all(not slot.pins and not slot.doomed for slot in self.slots)
        for state in (SlotState.WRITING, SlotState.COMMITTED):
            described = [(slot.page, slot.generation) for slot in self.slots if slot.state == state]
            assert self.headers.scan(state).named() == sorted(described)


@st.composite
def node_requests(draw) -> tuple[int, Message, bytes]:
    """(connection, request, its payload)."""
    grant = draw(lying(Grant, [2]))
    grant = msgspec.structs.replace(grant, **draw(st.sampled_from(({}, SOUND, SOUND, SOUND))))
    request = draw(any_of((kind for kind in KINDS.values() if kind.kind % 2 == 0 and kind.kind >= 30), [2]))
    if hasattr(request, "grant"):
        request = msgspec.structs.replace(request, grant=seal(grant, KEY))
    length = draw(st.sampled_from((PAGE_BYTES, PAGE_BYTES, 0, 1)))
    count = len(request.slots) // 4 if isinstance(request, WriteRequest) else draw(st.sampled_from((0, 0, 1)))
    return draw(st.integers(0, 1)), request, bytes(min(4, count) * length)


@given(st.lists(node_requests(), min_size=1, max_size=10))
def test_a_node_answers_or_refuses_whatever_a_writer_or_reader_says(said):
    with ExitStack() as stack:
        node = Node(stack)
        for connection, request, payload in said:
            node.ask(node.sessions[connection], request, payload)
            node.check()

        for session in node.sessions:
            session.closed()
        node.check()
        assert all(slot.state != SlotState.WRITING for slot in node.slots)
