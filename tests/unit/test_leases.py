"""Leases: what a match promises to keep, for how long, and how many bytes that may be."""

import pytest
from fake_node import SmallPool, chain, make_namespace

from kvpool.core.directory import DirectoryConfig, Want
from kvpool.core.directory.lookup import LEASE_MARGIN_S
from kvpool.core.limits import PAGE_BYTES

NO_ROOM = Want.NO_ROOM
UNCAPPED = DirectoryConfig(lease_cap=1.0)


def lease(pool, hashes, lease_s=5.0, first=0):
    return pool.directory.match(pool.namespace.id, b"".join(hashes), first, lease_s).blocks


def grant(pool, hashes, lease_s=5.0, first=0):
    return pool.directory.match(pool.namespace.id, b"".join(hashes), first, lease_s).lease


def fill(pool, blocks, first_token=100):
    """Store single blocks, each pressing the oldest leaf out of a full pool; which of them found room."""
    return [Want.NO_ROOM not in pool.store(chain(first_token + i)).wants for i in range(blocks)]


def test_a_leased_chain_outlasts_any_pressure():
    pool = SmallPool(4, config=UNCAPPED)
    pool.store(chain(1, 2, 3))
    assert lease(pool, chain(1, 2, 3)) == 3

    assert fill(pool, 5) == [True] * 5

    assert pool.visible(chain(1, 2, 3)) == [True] * 3


def test_a_chain_goes_when_its_lease_has_run_out():
    pool = SmallPool(3, config=UNCAPPED)
    pool.store(chain(1, 2, 3))
    lease(pool, chain(1, 2, 3), 5.0)

    pool.clock.advance(4.999)
    assert fill(pool, 1) == [False]
    pool.clock.advance(LEASE_MARGIN_S + 0.001)
    assert fill(pool, 1) == [True]

    assert pool.visible(chain(1, 2, 3)) == [True, True, False]


def test_the_grantor_holds_a_lease_longer_than_it_says():
    pool = SmallPool(1, config=UNCAPPED)
    pool.store(chain(1))
    lease(pool, chain(1), 5.0)

    pool.clock.advance(5.0 + LEASE_MARGIN_S / 2)

    assert fill(pool, 1) == [False]


def test_of_two_leases_the_longer_one_counts():
    pool = SmallPool(2, config=UNCAPPED)
    pool.store(chain(1, 2))
    lease(pool, chain(1, 2), 10.0)
    lease(pool, chain(1, 2), 1.0)

    pool.clock.advance(9.0)

    assert fill(pool, 1) == [False]


def test_a_lease_covers_no_more_than_was_matched():
    pool = SmallPool(4, config=UNCAPPED)
    pool.store(chain(1, 2, 3, 4))
    lease(pool, chain(1, 2))

    fill(pool, 3)

    assert pool.visible(chain(1, 2, 3, 4)) == [True, True, False, False]


def test_a_match_without_lease_promises_nothing():
    pool = SmallPool(2)
    pool.store(chain(1, 2))
    lease(pool, chain(1, 2), 0.0)

    assert pool.directory.stats().leases == 0
    assert fill(pool, 2) == [True, True]


def test_locate_promises_nothing():
    pool = SmallPool(2)
    pool.store(chain(1, 2))

    pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2)))

    assert pool.directory.stats().leases == 0
    assert fill(pool, 1) == [True]


# Releasing


def test_a_released_lease_holds_nothing_any_more():
    pool = SmallPool(2, config=UNCAPPED)
    pool.store(chain(1, 2))
    number = grant(pool, chain(1, 2))
    assert fill(pool, 1) == [False]

    assert pool.directory.release(number)

    assert (pool.directory.stats().leases, pool.directory.stats().leased_bytes) == (0, 0)
    assert fill(pool, 1) == [True]


def test_a_lease_ends_once():
    pool = SmallPool(2)
    pool.store(chain(1))
    released, expired = grant(pool, chain(1), 1.0), grant(pool, chain(1), 1.0)

    assert pool.directory.release(released)
    assert not pool.directory.release(released)
    pool.clock.advance(1.0 + LEASE_MARGIN_S)
    pool.directory.expire()
    assert not pool.directory.release(expired)
    assert not pool.directory.release(0)


def test_releasing_one_lease_leaves_the_others():
    pool = SmallPool(2, config=UNCAPPED)
    pool.store(chain(1, 2))
    numbers = [grant(pool, chain(1, 2), lease_s) for lease_s in (5.0, 10.0, 5.0)]

    for number in numbers:
        assert fill(pool, 1) == [False]
        pool.directory.release(number)

    assert fill(pool, 1) == [True]


def test_releasing_a_lease_leaves_a_pin():
    pool = SmallPool(1, config=UNCAPPED)
    pool.store(chain(1))
    number = grant(pool, chain(1))
    pool.directory.pin(pool.namespace.id, chain(1)[0])

    pool.directory.release(number)

    assert fill(pool, 1) == [False]


def test_a_match_without_use_for_a_block_has_no_lease():
    pool = SmallPool(2)
    pool.store(chain(1))

    assert grant(pool, chain(1), 0.0) == 0
    assert grant(pool, chain(1, 2), first=1) == 0
    assert grant(pool, chain(9)) == 0


# The cap


def test_the_cap_shortens_a_match_only_under_pressure():
    pool = SmallPool(10, config=DirectoryConfig(lease_cap=0.3, pressure=0.75))
    hashes = chain(1, 2, 3, 4, 5)
    pool.store(hashes)
    assert lease(pool, hashes) == 5
    pool.clock.advance(60.0)

    fill(pool, 3)

    assert lease(pool, hashes) == 3
    assert pool.visible(hashes) == [True] * 5
    assert lease(pool, hashes, 0.0) == 5


def test_leases_of_others_leave_less_room_under_the_cap():
    pool = SmallPool(10, config=DirectoryConfig(lease_cap=0.5, pressure=0.75))
    pool.store(chain(1, 2, 3, 4))
    pool.store(chain(5, 6, 7, 8))

    assert [lease(pool, chain(1, 2, 3, 4)), lease(pool, chain(5, 6, 7, 8))] == [4, 1]
    pool.clock.advance(5.0 + LEASE_MARGIN_S)
    assert lease(pool, chain(5, 6, 7, 8)) == 4


def test_a_lease_renewed_is_charged_once():
    pool = SmallPool(10, config=DirectoryConfig(lease_cap=0.4, pressure=0.0))
    pool.store(chain(1, 2, 3, 4))

    assert [lease(pool, chain(1, 2, 3, 4)) for _ in range(3)] == [4, 4, 4]
    assert pool.directory.stats().leased_bytes == 4 * PAGE_BYTES


def test_a_lease_is_charged_from_the_first_block_of_use():
    pool = SmallPool(10, config=DirectoryConfig(lease_cap=0.2, pressure=0.0))
    pool.store(chain(1, 2, 3, 4))

    assert lease(pool, chain(1, 2, 3, 4), first=2) == 4
    assert pool.directory.stats().leased_bytes == 2 * PAGE_BYTES
    pool.clock.advance(60.0)
    assert lease(pool, chain(1, 2, 3, 4), first=1) == 3


def test_every_shard_of_a_block_is_charged():
    sharded = make_namespace(shards=2)
    pool = SmallPool(10, namespaces=(sharded,))
    pool.store(chain(1, 2))

    lease(pool, chain(1, 2))

    assert pool.directory.stats().leased_bytes == 4 * PAGE_BYTES


@pytest.mark.parametrize("later_is_longer", [True, False])
def test_a_smaller_lease_on_a_leased_block_does_not_hide_the_larger_one(later_is_longer):
    pool = SmallPool(10)
    pool.store(chain(1, 2, 3, 4))
    lease(pool, chain(1, 2, 3, 4), 5.0, first=0)

    lease(pool, chain(1, 2, 3, 4), 6.0 if later_is_longer else 4.0, first=3)

    assert pool.directory.stats().leased_bytes == 4 * PAGE_BYTES


def test_a_larger_lease_on_a_leased_block_is_charged_even_if_it_is_shorter():
    pool = SmallPool(10)
    pool.store(chain(1, 2, 3, 4))
    lease(pool, chain(1, 2, 3, 4), 50.0, first=3)

    lease(pool, chain(1, 2, 3, 4), 5.0, first=0)

    assert pool.directory.stats().leased_bytes == 4 * PAGE_BYTES


def test_a_shortened_match_pays_for_itself():
    """What the deepest block is charged already is no room for a lease on another block."""
    pool = SmallPool(10, config=DirectoryConfig(lease_cap=0.4, pressure=0.0))
    hashes = chain(1, 2, 3, 4, 5, 6)
    pool.store(hashes)
    assert lease(pool, hashes, first=3) == 6

    assert lease(pool, hashes) == 1
    assert pool.directory.stats().leased_bytes == 4 * PAGE_BYTES


def test_leases_that_ran_out_are_forgotten():
    pool = SmallPool(10)
    pool.store(chain(1))
    pool.store(chain(2, 3))
    lease(pool, chain(1), 1.0)
    lease(pool, chain(2, 3), 10.0)
    assert pool.directory.stats().leases == 2

    pool.clock.advance(1.0 + LEASE_MARGIN_S)
    pool.directory.expire()

    assert (pool.directory.stats().leases, pool.directory.stats().leased_bytes) == (1, 2 * PAGE_BYTES)


# What is removed by force leaves its lease with the nearest ancestor


@pytest.mark.parametrize("lost", [3, 2, 1])
def test_a_lease_keeps_the_ancestors_of_a_block_that_is_lost(lost):
    pool = SmallPool(4, config=UNCAPPED)
    hashes = chain(1, 2, 3, 4)
    pool.store(hashes)
    lease(pool, hashes)

    pool.lose_block(hashes[lost])
    fill(pool, 6)

    assert pool.visible(hashes[:lost]) == [True] * lost


def test_a_lease_keeps_the_ancestors_when_a_node_is_lost():
    pool = SmallPool(2, 4, config=UNCAPPED)
    _, loses = pool.segments
    hashes = chain(1, 2, 3, 4, 5)
    pool.directory.set_accepting(loses.segment_id, accepting=False)
    pool.store(hashes[:2])
    pool.directory.set_accepting(loses.segment_id, accepting=True)
    pool.store(hashes)
    lease(pool, hashes)

    assert pool.lose(loses.segment_id) == 3
    assert fill(pool, 1) == [False]

    assert pool.visible(hashes) == [True, True, False, False, False]


def test_a_lease_keeps_the_ancestors_of_a_block_that_lost_a_shard_and_then_itself():
    sharded = make_namespace(shards=2)
    pool = SmallPool(6, namespaces=(sharded,), config=UNCAPPED)
    hashes = chain(1, 2, 3)
    pool.store(hashes)
    lease(pool, hashes)

    pool.lose_block(hashes[1], shard=0)
    pool.lose_block(hashes[1], shard=1)
    for token in range(100, 104):
        pool.store(chain(token))

    assert pool.visible(hashes[:1]) == [True]


@pytest.mark.parametrize("lost", [[3], [2], [2, 3], [3, 2], [1, 3]])
def test_the_lease_of_a_lost_block_can_be_released(lost):
    pool = SmallPool(4, config=UNCAPPED)
    hashes = chain(1, 2, 3, 4)
    pool.store(hashes)
    number = grant(pool, hashes)
    for i in lost:
        pool.lose_block(hashes[i])
    fill(pool, 4)
    kept = min(lost)
    assert pool.visible(hashes[:kept]) == [True] * kept

    assert pool.directory.release(number)

    fill(pool, 4, first_token=200)
    assert pool.visible(hashes) == [False] * 4
    assert pool.directory.stats().leased_bytes == 0


def test_releasing_a_lease_on_an_ancestor_leaves_the_one_of_a_block_that_was_below():
    pool = SmallPool(4, config=UNCAPPED)
    hashes = chain(1, 2, 3)
    pool.store(hashes)
    below, above = grant(pool, hashes), grant(pool, hashes[:1])
    pool.lose_block(hashes[1])

    pool.directory.release(above)
    fill(pool, 5)
    assert pool.visible(hashes[:1]) == [True]

    pool.directory.release(below)
    fill(pool, 4, first_token=200)
    assert pool.visible(hashes[:1]) == [False]


def test_a_lease_whose_whole_chain_is_lost_is_over():
    pool = SmallPool(4)
    pool.store(chain(1, 2))
    number = grant(pool, chain(1, 2))

    pool.lose(pool.segments[0].segment_id)

    assert (pool.directory.stats().leases, pool.directory.stats().leased_bytes) == (0, 0)
    assert not pool.directory.release(number)
