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


def test_locate_leases_as_match_does():
    pool = SmallPool(2, config=UNCAPPED)
    pool.store(chain(1, 2))

    pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2)), lease_s=5.0)

    assert fill(pool, 1) == [False]


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


def test_leases_that_ran_out_or_lost_their_block_are_forgotten():
    pool = SmallPool(10)
    pool.store(chain(1))
    pool.store(chain(2, 3))
    lease(pool, chain(1), 1.0)
    lease(pool, chain(2, 3), 10.0)
    assert pool.directory.stats().leases == 2

    pool.clock.advance(1.0 + LEASE_MARGIN_S)
    pool.directory.expire()
    assert (pool.directory.stats().leases, pool.directory.stats().leased_bytes) == (1, 2 * PAGE_BYTES)

    pool.lose_block(chain(2, 3)[1])
    assert (pool.directory.stats().leases, pool.directory.stats().leased_bytes) == (0, 0)


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
    keeps, loses = pool.segments
    hashes = chain(1, 2, 3, 4, 5)
    pool.directory.set_accepting(loses.segment_id, accepting=False)
    pool.store(hashes[:2])
    pool.directory.set_accepting(loses.segment_id, accepting=True)
    pool.store(hashes)
    lease(pool, hashes)

    assert pool.directory.lose_segment(loses.segment_id) == 3
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
