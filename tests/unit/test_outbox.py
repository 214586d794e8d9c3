"""Orders to nodes: numbered, kept until acknowledged, and never undone by an inventory."""

import pytest
from fake_node import SmallPool, chain, make_namespace

from kvpool.core.directory import DirectoryConfig, Want
from kvpool.core.directory.outbox import Outbox


def evict(pool, stored, presses):
    """Store single blocks, then as many that press the oldest out."""
    for token in range(stored + presses):
        pool.clock.advance(1.0)
        pool.store(chain(token))


def test_orders_are_numbered_from_one_in_the_order_they_were_given():
    pool = SmallPool(3)
    evict(pool, stored=3, presses=3)

    orders = pool.directory.orders("node-0")

    assert [order.number for order in orders] == [1, 2, 3]
    assert [order.generation for order in orders] == [1, 2, 3]
    assert {order.segment_id for order in orders} == {pool.segments[0].segment_id}


def test_orders_stay_until_they_are_acknowledged():
    pool = SmallPool(3)
    evict(pool, stored=3, presses=3)

    assert pool.directory.orders("node-0") == pool.directory.orders("node-0")
    pool.directory.acknowledge("node-0", 2)

    assert [order.number for order in pool.directory.orders("node-0")] == [3]
    assert pool.directory.stats().orders_pending == 1


def test_orders_come_in_parts():
    pool = SmallPool(4)
    evict(pool, stored=4, presses=4)
    pool.directory.acknowledge("node-0", 1)

    parts = [[o.number for o in pool.directory.orders("node-0", after, 2)] for after in (0, 2, 3, 4, 99)]

    assert parts == [[2, 3], [3, 4], [4], [], []]


def test_acknowledging_again_or_ahead_is_harmless():
    outbox = Outbox()
    outbox.push(bytes(16), 0, 1, rest=False)
    outbox.acknowledge(7)
    outbox.acknowledge(0)

    outbox.push(bytes(16), 0, 2, rest=False)

    assert [order.number for order in outbox.pending(0, 10)] == [2]


def test_an_unknown_node_has_no_orders():
    pool = SmallPool(1)

    assert pool.directory.orders("nobody") == []
    pool.directory.acknowledge("nobody", 5)


def test_orders_go_to_the_node_that_holds_the_slot():
    pool = SmallPool(1, 1)
    evict(pool, stored=2, presses=2)

    for segment in pool.segments:
        (order,) = pool.directory.orders(segment.node_id)
        assert order.segment_id == segment.segment_id


def test_victims_travel_in_the_grant_that_needs_their_room():
    pool = SmallPool(2)
    evict(pool, stored=2, presses=0)

    result = pool.reserve(chain(7, 8))

    victims = [order for share in result.shares.values() for order in share.victims]
    assert victims == pool.directory.orders("node-0")
    assert len(victims) == 2


def test_victims_of_one_reserve_do_not_travel_in_the_next():
    pool = SmallPool(2)
    evict(pool, stored=2, presses=0)
    pool.reserve(chain(7))

    result = pool.reserve(chain(8))

    assert [len(share.victims) for share in result.shares.values()] == [1]


def test_what_was_freed_without_a_grant_travels_in_the_next_one():
    """So that a node which has not read its control stream yet finds the room it was promised."""
    sharded = make_namespace(shards=2)
    pool = SmallPool(2, namespaces=(sharded,))
    result = pool.reserve(chain(1))
    pool.commit_share(result, 0, 0, chain(1))
    pool.directory.abort(result.reservation)

    again = pool.reserve(chain(2))

    assert [order for share in again.shares.values() for order in share.victims] == pool.directory.orders("node-0")
    assert len(pool.directory.orders("node-0")) == 1


def test_a_freed_block_is_not_resurrected_by_an_inventory():
    pool = SmallPool(2)
    evict(pool, stored=2, presses=0)
    segment = pool.segments[0]
    slots = list(segment.held.values())
    pool.reserve(chain(9))
    (order,) = pool.directory.orders(segment.node_id)
    pool.lose(segment.segment_id)
    pool.join(segment)

    wanted = pool.announce(segment, slots)

    assert wanted == [slot.slot != order.slot for slot in slots]
    assert pool.visible(chain(0)) == [False]


def test_a_slot_that_was_freed_and_used_again_can_be_announced():
    pool = SmallPool(1)
    evict(pool, stored=1, presses=1)
    segment = pool.segments[0]
    assert [order.slot for order in pool.directory.orders("node-0")] == list(segment.held)
    pool.lose(segment.segment_id)
    pool.join(segment)

    assert pool.announce(segment, list(segment.held.values())) == [True]


def test_an_evicted_slot_can_be_used_at_once_and_a_bad_one_rests():
    pool = SmallPool(1, 1)
    evict(pool, stored=2, presses=1)
    segment, slot = pool.slot_of(chain(1)[0])
    pool.directory.report_bad(segment.segment_id, pool.namespace.id, slot.hash, slot.slot, slot.generation)

    assert [order.rest for node in ("node-0", "node-1") for order in pool.directory.orders(node)] == [False, True]


@pytest.mark.parametrize("leased", [1, 2])
def test_what_a_reader_may_have_leased_rests_when_it_is_removed_by_force(leased):
    """Here: a block that lost a shard and is written again. A lease on a block below covers it too."""
    sharded = make_namespace(shards=2)
    pool = SmallPool(10, namespaces=(sharded,), config=DirectoryConfig(lease_cap=1.0))
    hashes = chain(1, 2)[:leased]
    pool.store(hashes)
    pool.directory.match(sharded.id, b"".join(hashes), lease_s=5.0)
    pool.lose_block(hashes[0], shard=1)

    assert list(pool.reserve(hashes).wants) == [Want.WANTED, Want.EXISTS][:leased]

    assert [order.rest for order in pool.directory.orders("node-0")] == [True]


def test_a_reservation_that_wrote_nothing_orders_nothing():
    pool = SmallPool(2)
    result = pool.reserve(chain(1, 2))

    pool.directory.abort(result.reservation)

    assert pool.directory.orders("node-0") == []


def test_a_later_order_for_a_slot_takes_the_place_of_an_earlier_one():
    """A node that frees slots for its writers, and never acknowledges an order, has no more of them than slots."""
    outbox = Outbox()
    for generation in range(1, 1_000):
        for slot in range(3):
            outbox.push(bytes(16), slot, generation, rest=False)
    outbox.push_copy(7)

    assert len(outbox) == 4
    assert [order.number for order in outbox.pending(0, 2)] == [2995, 2996]
    assert [order.number for order in outbox.pending(2996, 10)] == [2997, 2998]
    assert outbox.has_freed(bytes(16), 1, 999)
    assert not outbox.has_freed(bytes(16), 1, 998)

    outbox.acknowledge(2996)
    assert [order.number for order in outbox.pending(0, 10)] == [2997, 2998]
    outbox.acknowledge(2998)
    assert outbox.frees_nothing
    assert len(outbox) == 0
