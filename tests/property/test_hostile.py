"""What clients and nodes say to the metadata service: wrong lengths and counts, numbers out of range, others' names.

It answers or refuses with an error of ours, and is sound afterwards.
"""

import itertools
import logging
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.directory import CommitStatus
from kvpool.core.errors import CapacityError, KvpoolError, ProtocolError
from kvpool.core.keys import chain_hashes
from kvpool.core.limits import PAGE_BYTES, RESERVE_BLOCKS_MAX
from kvpool.core.members import MemberSegment
from kvpool.core.namespace import Namespace
from kvpool.core.principals import anyone
from kvpool.meta.framed import MetaSession
from kvpool.meta.membership import MembershipServicer, _Stream
from kvpool.meta.service import MetaService
from kvpool.ops.settings import MetaSettings
from kvpool.testing import ManualClock
from kvpool.transport.wire.messages import KINDS, ReserveRequest
from kvpool.transport.wire.payload import Payload
from kvpool.v1 import common_pb2, membership_pb2

from .hostile_values import (
    HASHES,
    NAMESPACE,
    SEGMENTS,
    SMALL,
    TOO_MANY,
    U64,
    UNKNOWN,
    answer,
    any_of,
    chains,
    columns,
    numbers_32,
    numbers_64,
)


@pytest.fixture(autouse=True)
def quiet(reset_logging):
    """Thousands of nodes join and leave here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


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


def test_a_reservation_too_large_to_be_told_is_refused_and_nothing_of_it_is_in_flight():
    pool, many = Pool(), b"".join(chain_hashes(range(RESERVE_BLOCKS_MAX), 1))
    wide = Namespace(model="wide", block_tokens=1, block_bytes=1, shards=16)
    pool.service.open_namespace(wide.document)
    large = pool.service.join("large", 1, (), (MemberSegment(b"l" * 16, "shm", 1 << 40),))
    pool.service.ready(large)
    before = pool.service.status().stats

    refused = answer(MetaSession(pool.service), ReserveRequest(wide.id, many, 0, b"", 0, 0), Payload(None, 0))

    assert isinstance(refused, CapacityError)
    assert "reserve fewer blocks at a time" in str(refused)
    after = pool.service.status().stats
    assert (after.used_bytes, after.reservations) == (before.used_bytes, before.reservations)


# Inventories and control streams


@st.composite
def inventories(draw) -> membership_pb2.Inventory:
    count = draw(st.integers(0, 4))
    parents = draw(columns(count, chains | st.just(bytes(32))).map(b"".join))
    return membership_pb2.Inventory(
        segment_id=draw(st.sampled_from((*SEGMENTS, b"", b"x" * 16))),
        document=draw(st.sampled_from((NAMESPACE.document, SMALL.document, UNKNOWN.document, b"", b"{}"))),
        hashes=draw(columns(count, chains).map(b"".join) | st.binary(max_size=70) | st.sampled_from(TOO_MANY)),
        parents=parents + draw(st.sampled_from((b"", b"", b"", b"?"))),
        shards=draw(packed(count, st.integers(0, 2) | st.integers(0, 0xFFFF), "<u2")),
        slots=draw(packed(count, numbers_32, "<u4")),
        generations=draw(packed(count, numbers_64, "<u8")),
        checksums=draw(packed(count, numbers_64, "<u8")),
        ages_s=draw(packed(count, st.sampled_from((0.0, 1.0)) | st.floats(width=32), "<f4")),
    )


def packed(count: int, values: st.SearchStrategy, dtype: str) -> st.SearchStrategy[bytes]:
    """A column, or a few bytes that are none."""
    whole = columns(count, values).map(lambda column: np.array(column, dtype).tobytes())
    return whole | whole | whole | st.binary(max_size=9)


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
heartbeats = st.builds(membership_pb2.Heartbeat, orders_applied=numbers_64)
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
            pool.members.append(servicer._join(iter([membership_pb2.FromNode(hello=hello)]), anyone("")))
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
        assert len(servicer.Commit(request, SimpleNamespace(peer=str)).statuses) == len(request.slot)

    pool.check()
