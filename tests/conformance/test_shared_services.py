"""Two services over one Redis, in this process: a node of the one is a node of the other, in one session at a time."""

import os
import time
from functools import partial

import pytest
from fake_node import FakeSegment, chain, make_namespace
from redis_servers import RedisServer

from kvpool.core.directory import DISK, CommitStatus, Inventory, MissReason, Want
from kvpool.core.errors import StaleGrantError, UnavailableError, UsageError
from kvpool.core.grants import open_grant
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import Member, MemberSegment, MemberState
from kvpool.core.read_grants import READ_GRANT_S, open_read_grant
from kvpool.meta.looking import find_block, namespace_usage
from kvpool.meta.service import NOBODYS
from kvpool.meta.shared.service import SharedMetaService
from kvpool.ops.settings import MetaSettings

NAMESPACE = make_namespace()
CHAIN = chain(*range(20))
PACKED = b"".join(CHAIN)
SEGMENT_ID = bytes([5]) * 16


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def services(redis_server):
    """Two of them, with an empty Redis."""
    redis_server.client.flushall()
    settings = MetaSettings(state=redis_server.url, expected_nodes=1, lease_max_s=1.0)
    pair = [SharedMetaService(settings, time.monotonic, os.urandom) for _ in range(2)]
    for i, service in enumerate(pair):
        service.started(f"meta-{i}:7300")
    yield pair
    for service in pair:
        service.close()


class Node:
    """One that holds slots, and tells a service of them."""

    def __init__(self) -> None:
        self.segment = FakeSegment(SEGMENT_ID, "n0", 64 * PAGE_BYTES)
        self.incarnation = 77
        self.member: Member | None = None

    def join(self, service: SharedMetaService, medium: str = "shm") -> None:
        described = MemberSegment(SEGMENT_ID, medium, self.segment.capacity_bytes)
        self.member = service.join("n0", self.incarnation, ("tcp://n0:1",), (described,))

    def announce(self, service: SharedMetaService) -> list[bool]:
        part = Inventory.of([slot.announced for slot in self.segment.held.values()])
        return service.take_inventory(self.member, SEGMENT_ID, NAMESPACE.document, part).tolist()

    def come(self, service: SharedMetaService) -> None:
        self.join(service)
        if self.segment.held:
            self.announce(service)
        service.ready(self.member)

    def write(self, service: SharedMetaService, reserved, session: int | None = None) -> list[CommitStatus]:
        """What the grants of a reservation allow, committed at any service."""
        slots = []
        for grant in reserved.grants:
            opened = open_grant(grant.grant, self.member.key)
            assert opened.incarnation == service.fence
            assert opened.session == self.member.session
            hashes = [opened.hashes[i : i + 32] for i in range(0, len(opened.hashes), 32)]
            parents = [opened.parents[i : i + 32] for i in range(0, len(opened.parents), 32)]
            slots += [self.segment.store(NAMESPACE, h, p.strip(b"\0"), 0) for h, p in zip(hashes, parents, strict=True)]
        written = [slot.written for slot in slots]
        return service.commit(session or self.member.session, SEGMENT_ID, reserved.result.reservation, written)


@pytest.fixture
def node():
    return Node()


def reserve(service, hashes=PACKED):
    return service.reserve(NAMESPACE.id, hashes, 0, b"", "writer", 30.0)


def matched(service, hashes=PACKED):
    return service.match(NAMESPACE.id, hashes, 0, 0.0).blocks


@pytest.fixture
def stored(services, node):
    """A chain that was reserved at one service and committed at the other."""
    a, b = services
    node.come(a)
    a.open_namespace(NAMESPACE.document)
    reserved = reserve(b)
    assert set(node.write(a, reserved)) == {CommitStatus.COMMITTED}
    return services


def test_what_one_service_grants_the_other_takes(stored):
    a, b = stored
    assert matched(a) == matched(b) == len(CHAIN)
    location = b.locate(NAMESPACE.id, PACKED, 0, None)
    named = {segment.number for part in a.topology(0).nodes for segment in part.segments}
    assert set(location.segment) <= named
    status = b.status()
    assert {server.address for server in status.state.servers} == {"meta-0:7300", "meta-1:7300"}
    assert status.stats.blocks == len(CHAIN)
    lease = a.match(NAMESPACE.id, PACKED, 0, 1.0).lease
    assert b.release(lease)
    assert not a.release(lease)
    in_flight = reserve(a, b"".join(chain(*range(100, 104))))
    assert set(reserve(b, b"".join(chain(*range(100, 104)))).result.wants) == {Want.IN_FLIGHT}
    assert b.abort(in_flight.result.reservation, None) == 4


def test_tenants_are_kept_apart_by_every_service(stored):
    a, b = stored
    own, tenant = NAMESPACE.id, NAMESPACE.tenant
    for service in stored:
        assert service.visible(own, tenant) == service.visible(own, None) == own
        assert service.visible(own, "rival") == service.visible(bytes([9]) * 32, tenant) == NOBODYS
    lease = a.match(own, PACKED, 0, 1.0).lease
    assert not b.release(lease, "rival")
    assert b.release(lease, tenant)
    write = reserve(a, b"".join(chain(*range(100, 104)))).result.reservation
    assert b.abort(write, None, tenant="rival") == 0
    assert b.abort(write, None, tenant=tenant) == 4


def test_every_service_seals_read_grants_for_the_nodes_session_until_that_ends(stored, node):
    a, b = stored
    assert b.reads.since(NAMESPACE.id, 0) is None  # nobody is authenticated
    for service in stored:
        service.reads.is_on = True
        service.locate(NAMESPACE.id, PACKED, 0, None)
        grants = service.reads.since(NAMESPACE.id, 0)
        assert service.reads.since(NAMESPACE.id, grants.version) is None
        opened = open_read_grant(grants.nodes[0].grant, node.member.key)
        assert (opened.incarnation, opened.session) == (service.fence, node.member.session)
        assert opened.namespace == NAMESPACE.id
        assert opened.until_ms == pytest.approx(READ_GRANT_S * 1000, abs=30_000)
    before = node.member.key
    node.join(b)
    a.locate(NAMESPACE.id, PACKED, 0, None)  # which learns of it
    [sealed] = a.reads.since(NAMESPACE.id, 0).nodes
    assert open_read_grant(sealed.grant, node.member.key).session == node.member.session
    with pytest.raises(StaleGrantError):
        open_read_grant(sealed.grant, before)


def test_each_service_tells_what_a_namespace_holds_and_what_it_was_asked_itself(stored):
    a, b = stored
    a.match(NAMESPACE.id, PACKED, 0, 0.0)
    b.locate(NAMESPACE.id, PACKED, 0, None)
    [told_a], [told_b] = namespace_usage(a), namespace_usage(b)
    size_bytes = len(CHAIN) * NAMESPACE.block_bytes
    assert told_a.blocks == told_b.blocks == len(CHAIN)
    assert (told_a.asked_blocks, told_a.matched_blocks, told_a.stored_bytes) == (len(CHAIN), len(CHAIN), size_bytes)
    assert (told_b.asked_blocks, told_b.read_bytes, told_b.stored_bytes) == (0, size_bytes, 0)


def test_what_is_not_there_yet_names_the_setting(stored):
    a, _ = stored
    for refused in (
        lambda: a.ask(partial(find_block, [NAMESPACE.id], CHAIN[0])),
        lambda: a.quotas.change("acme", {"pins": 1}, []),
        lambda: a.mover.drain("n0", 1.0, stay=False),
    ):
        with pytest.raises(UsageError, match=r"with meta\.state"):
            refused()


def test_a_node_that_goes_to_another_service_keeps_its_blocks_all_the_time(stored, node):
    a, b = stored
    before = node.member
    late = reserve(a, b"".join(chain(*range(200, 204))))
    node.join(b)
    assert matched(a) == len(CHAIN)
    location = b.locate(NAMESPACE.id, PACKED, 0, None)
    assert set(location.segment) <= {s.number for part in b.topology(0).nodes for s in part.segments}
    with pytest.raises(UnavailableError):
        a.heard(before, 0)
    assert set(a.commit(before.session, SEGMENT_ID, late.result.reservation, [(CHAIN[0], 0, 1, 1, 1)])) == {
        CommitStatus.STALE
    }
    a.leave(before)  # its stream there has ended: that is not the node's end
    kept = list(node.segment.held.values())[5:]
    gone = [slot for slot in node.segment.held.values() if slot not in kept]
    for slot in gone[-1:]:
        node.segment.free(slot.slot, slot.generation)
    assert all(node.announce(b))
    b.ready(node.member)
    for service in stored:
        service.tick()
    assert matched(a) == matched(b) == CHAIN.index(gone[-1].hash)  # what it did not announce went, and no more
    assert a.status().stats.blocks == len(CHAIN) - 1


def test_a_live_nodes_name_is_its_own(services, node):
    a, b = services
    node.come(a)
    node.incarnation = 78
    with pytest.raises(UsageError, match="a live node is called 'n0'"):
        node.join(b)


def test_a_disk_is_refused(services, node):
    with pytest.raises(UsageError, match="no disk tier yet"):
        node.join(services[0], medium=DISK)


def test_a_silent_node_gets_no_new_blocks_and_then_is_lost(stored, node, redis_server):
    a, b = stored

    def silent_for(seconds: float) -> None:
        (key,) = redis_server.client.keys("kvpool:{pool}:*:seen")
        now_s, micros = redis_server.client.time()
        redis_server.client.hset(key, "n0", int((now_s - seconds) * 1e6 + micros))

    silent_for(0.8 * b.settings.node_ttl_s)
    b.tick()
    assert set(reserve(a, b"".join(chain(*range(300, 304)))).result.wants) == {Want.NO_ROOM}
    a.heard(node.member, 0)
    assert set(reserve(a, b"".join(chain(*range(300, 304)))).result.wants) == {Want.WANTED}
    silent_for(1.1 * b.settings.node_ttl_s)
    b.tick()
    assert a.match(NAMESPACE.id, PACKED, 0, 0.0).reason == MissReason.NODE_DOWN
    a.tick()
    assert [member.state for member in a.ask(lambda _, members: list(members))] == [MemberState.LOST]
    with pytest.raises(UnavailableError):
        a.heard(node.member, 0)
    node.come(b)
    assert matched(a) == len(CHAIN)


def test_orders_come_from_whichever_service_holds_the_stream_until_they_are_acknowledged(stored, node):
    a, b = stored
    slot = node.segment.held[3]
    assert a.report_bad(NAMESPACE.id, slot.hash, SEGMENT_ID, slot.slot, slot.generation)
    node.member.state = MemberState.READY
    (order,) = a.wait_for_orders(node.member, 0, 0.0)
    assert (order.segment_id, order.slot, order.generation) == (SEGMENT_ID, slot.slot, slot.generation)
    node.join(b)  # before it has said that it applied it
    assert not all(node.announce(b))  # the slot that is ordered free is not taken for a new one
    b.ready(node.member)
    (again,) = b.wait_for_orders(node.member, 0, 0.0)
    assert again.number > order.number
    b.heard(node.member, again.number)
    assert b.wait_for_orders(node.member, 0, 0.0) == []
