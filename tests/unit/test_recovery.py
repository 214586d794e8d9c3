"""A service that has just started: when it is sure of what it does not know, and what it spares until then."""

import numpy as np
import pytest
from fake_node import SHARDED, SmallPool, chain, make_namespace

from kvpool.core.directory import DirectoryConfig, Inventory, Match, MissReason, Want
from kvpool.core.errors import UnknownNamespaceError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import MemberSegment, MemberState
from kvpool.core.recovery import Recovery
from kvpool.meta.service import LOSS_BLOCKS, MetaService
from kvpool.ops.settings import MetaSettings
from kvpool.testing import ManualClock

NAMESPACE = make_namespace()
WAIT_S, DEADLINE_S = 3.0, 60.0


@pytest.fixture
def clock():
    return ManualClock()


def report(recovery, *nodes):
    for node in nodes:
        recovery.joined(node)
        recovery.reported(node)


def test_it_ends_with_the_last_of_the_expected_nodes(clock):
    recovery = Recovery(clock, 2, WAIT_S, DEADLINE_S)
    report(recovery, "a")
    clock.advance(WAIT_S + 1)
    assert not recovery.ends()

    report(recovery, "a", "b")

    assert recovery.active
    assert recovery.ends()
    assert not recovery.active
    assert not recovery.ends(), "it ends once"


def test_a_node_that_left_does_not_count(clock):
    recovery = Recovery(clock, 2, WAIT_S, DEADLINE_S)
    report(recovery, "a", "b")
    recovery.left("a")
    assert not recovery.ends()
    recovery.joined("b")
    report(recovery, "a")
    assert not recovery.ends(), "b reports anew"
    recovery.reported("b")
    assert recovery.ends()


def test_without_a_number_it_waits_after_the_last_node_that_joined(clock):
    recovery = Recovery(clock, 0, WAIT_S, DEADLINE_S)
    clock.advance(WAIT_S)
    assert not recovery.ends(), "nobody has reported"
    report(recovery, "a")
    clock.advance(WAIT_S - 0.1)
    recovery.joined("b")
    clock.advance(WAIT_S)
    assert not recovery.ends(), "b is still reporting"
    recovery.reported("b")
    assert recovery.ends()
    assert recovery.lasted_s == pytest.approx(3 * WAIT_S - 0.1)


@pytest.mark.parametrize("expected", [0, 2])
def test_the_deadline_ends_it_whoever_is_missing(clock, expected):
    recovery = Recovery(clock, expected, WAIT_S, DEADLINE_S)
    recovery.joined("a")
    clock.advance(DEADLINE_S - 0.1)
    assert not recovery.ends()
    clock.advance(0.1)
    assert recovery.ends()


class Service:
    """A metadata service with nodes that announce one chain each."""

    def __init__(self, clock, **settings):
        self.recovered = 0
        self.meta = MetaService(MetaSettings(**settings), clock, np.random.default_rng(1).bytes, self._recovered)

    def _recovered(self):
        self.recovered += 1

    def join(self, name, *hashes, parents=None, capacity=100):
        segment = MemberSegment(name.encode().ljust(16), "shm", capacity * PAGE_BYTES)
        member = self.meta.join(name, 1, (), (segment,))
        if hashes:
            count = len(hashes)
            numbers = np.arange(count)
            above = list(parents or [b"", *hashes[:-1]])
            part = Inventory(
                list(hashes),
                above,
                np.zeros(count, np.uint16),
                numbers.astype(np.uint32),
                (numbers + 1).astype(np.uint64),
                numbers.astype(np.uint64),
                np.zeros(count, np.float32),
            )
            assert self.meta.take_inventory(member, segment.segment_id, NAMESPACE.document, part).all()
        return member

    def match(self, hashes, lease_s=0.0):
        return self.meta.match(NAMESPACE.id, b"".join(hashes), 0, lease_s)


def test_what_is_not_known_yet_is_recovering_and_what_was_announced_is_matched(clock):
    service = Service(clock, expected_nodes=2)
    hashes = chain(1, 2, 3)
    assert service.match(hashes) == Match(0, MissReason.RECOVERING), "not even the namespace is known"
    nothing = service.meta.locate(NAMESPACE.id, b"".join(hashes), 0, None)
    assert (nothing.blocks, len(nothing.slot), nothing.reason) == (0, 0, MissReason.RECOVERING)

    first = service.join("a", *hashes[:1], hashes[2], parents=[b"", hashes[1]])
    assert service.match(hashes) == Match(1, MissReason.RECOVERING)
    assert service.match(hashes[2:]) == Match(0, MissReason.RECOVERING), "its parent may come"
    service.meta.ready(first)
    assert service.match(chain(9)) == Match(0, MissReason.RECOVERING)

    second = service.join("b", hashes[1], parents=[hashes[0]])
    service.meta.ready(second)

    assert service.match(hashes) == Match(3, None)
    assert service.match(chain(9)) == Match(0, MissReason.COLD)
    assert service.recovered == 1
    with pytest.raises(UnknownNamespaceError):
        service.meta.match(bytes(32), chain(1)[0], 0, 0.0)


def test_status_tells_how_far_it_is(clock):
    service = Service(clock, expected_nodes=2)
    service.meta.ready(service.join("a"))
    clock.advance(2.5)
    recovery = service.meta.status().recovery
    assert (recovery.active, recovery.reported_nodes, recovery.expected_nodes) == (True, 1, 2)
    assert recovery.lasted_s == 2.5


def test_the_tick_ends_what_only_time_can_end(clock):
    service = Service(clock)
    service.meta.ready(service.join("a"))
    clock.advance(service.meta.settings.recovery_wait_s)
    assert service.match(chain(1)).reason == MissReason.RECOVERING
    service.meta.tick()
    service.meta.open_namespace(NAMESPACE.document)
    assert service.match(chain(1)).reason == MissReason.COLD


def test_nothing_announced_is_evicted_while_an_earlier_lease_may_run(clock):
    service = Service(clock, expected_nodes=1, lease_max_s=10.0)
    old, new = chain(1, 2), chain(7, 8)
    service.meta.ready(service.join("a", *old, capacity=2))

    refused = service.meta.reserve(NAMESPACE.id, b"".join(new), 0, b"", "w", 0.0)
    assert list(refused.result.wants) == [Want.NO_ROOM] * 2
    assert service.match(old).blocks == 2

    clock.advance(10.25)
    granted = service.meta.reserve(NAMESPACE.id, b"".join(new), 0, b"", "w", 0.0)
    assert list(granted.result.wants) == [Want.WANTED] * 2
    assert service.match(old).blocks == 0


def test_a_new_pool_evicts_at_once(clock):
    service = Service(clock)
    service.meta.open_namespace(NAMESPACE.document)
    member = service.join("a", capacity=1)
    service.meta.ready(member)
    first = service.meta.reserve(NAMESPACE.id, chain(1)[0], 0, b"", "w", 0.0)
    written = [(chain(1)[0], 0, 0, 1, 5)]
    service.meta.commit(member.session, member.segments[0].segment_id, first.result.reservation, written)
    second = service.meta.reserve(NAMESPACE.id, chain(2)[0], 0, b"", "w", 0.0)
    assert list(second.result.wants) == [Want.WANTED]


@pytest.mark.parametrize(("spare_s", "rests"), [(5.0, True), (0.0, False)])
def test_a_slot_freed_while_an_earlier_lease_may_run_rests(spare_s, rests):
    pool = SmallPool(10, namespaces=(SHARDED,), config=DirectoryConfig(spare_s=spare_s))
    (segment,) = pool.segments
    pool.announce(segment, [segment.store(SHARDED, chain(1)[0], b"", 0)])

    assert list(pool.reserve(chain(1)).wants) == [Want.WANTED], "its other shard has not come back"

    assert [order.rest for order in pool.directory.orders("node-0")] == [rests]


def test_numbers_of_another_epoch_name_nothing():
    old, new = (SmallPool(10, config=DirectoryConfig(epoch=epoch)) for epoch in (5, 6))
    for pool in (old, new):
        pool.store(chain(1))
    reserved = [pool.reserve(chain(2)).reservation for pool in (old, new)]
    leases = [pool.directory.match(pool.namespace.id, chain(1)[0], 0, 5.0).lease for pool in (old, new)]

    assert not set(reserved) & set(leases)
    assert len({*reserved, *leases}) == 4
    assert new.directory.abort(reserved[0]) == 0
    assert not new.directory.release(leases[0])
    assert new.directory.abort(reserved[1]) == 1
    assert new.directory.release(leases[1])


def test_a_large_loss_leaves_the_lock_between_slices(clock):
    service = Service(clock, expected_nodes=1)
    hashes = chain(*range(2 * LOSS_BLOCKS + 10))
    member = service.join("a", *hashes, capacity=len(hashes))
    service.meta.ready(member)

    service.meta.leave(member)

    assert service.meta.work.is_set(), "the rest is for the tick"
    assert service.meta.status().stats.blocks == LOSS_BLOCKS + 10
    assert service.match(hashes).blocks == LOSS_BLOCKS + 10, "what is left is still prefix-closed"
    service.meta.tick()
    assert service.meta.status().stats.blocks == 0
    assert not service.meta.work.is_set()
    service.meta.check_integrity()


def test_a_node_that_returns_while_its_loss_is_worked_off_keeps_its_blocks(clock):
    service = Service(clock, expected_nodes=1)
    hashes = chain(*range(2 * LOSS_BLOCKS))
    service.meta.ready(service.join("a", *hashes, capacity=len(hashes)))
    service.meta.leave(next(iter(service.meta._members)))

    service.meta.ready(service.join("a", *hashes, capacity=len(hashes)))
    service.meta.tick()

    assert service.match(hashes).blocks == len(hashes)
    assert len(service.meta.status().used) == 1
    service.meta.check_integrity()


def test_a_paused_service_blames_nobody_for_the_silence(clock):
    service = Service(clock)
    member = service.join("a")
    service.meta.ready(member)
    clock.advance(1_000.0)
    service.meta.resumed()
    service.meta.tick()
    assert member.state == MemberState.READY
    clock.advance(service.meta.settings.node_ttl_s + 0.1)
    service.meta.tick()
    assert member.state == MemberState.LOST
