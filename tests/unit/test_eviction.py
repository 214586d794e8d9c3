"""What goes when the pool is full, and where a new block comes to lie: one decision."""

import pytest
from fake_node import SmallPool, chain, make_namespace

from kvpool.core.directory import DirectoryConfig, MissReason, Want
from kvpool.core.directory.table import BlockTable
from kvpool.core.errors import SettingsError
from kvpool.core.eviction import create_policy

EXACT = DirectoryConfig(age_slack=0.0)


def store(pool, *tokens):
    """Store a chain, a second after whatever came before; what `reserve` said of each block."""
    pool.clock.advance(1.0)
    return list(pool.store(chain(*tokens)).wants)


def touch(pool, *tokens):
    pool.clock.advance(1.0)
    assert pool.directory.match(pool.namespace.id, b"".join(chain(*tokens))).blocks == len(tokens)


def pin(pool, *tokens, ttl_s=None):
    return pool.directory.pin(pool.namespace.id, chain(*tokens)[-1], ttl_s)


def segment_of(pool, *tokens):
    return pool.slot_of(chain(*tokens)[-1])[0]


# What goes


def test_leaves_go_before_their_parents():
    pool = SmallPool(4)
    store(pool, 1, 2, 3, 4)

    for left in (3, 2, 1, 0):
        store(pool, 10 + left)
        assert pool.visible(chain(1, 2, 3, 4)) == [True] * left + [False] * (4 - left)


def test_the_oldest_leaf_of_the_pool_goes_first():
    pool = SmallPool(3, 3, config=EXACT)
    for token in range(6):
        store(pool, token)
    touch(pool, 0)

    for token in range(10, 15):
        store(pool, token)

    assert pool.visible([chain(token)[0] for token in range(6)]) == [True] + [False] * 5


def test_a_touch_of_a_chain_keeps_all_of_it():
    pool = SmallPool(4, config=EXACT)
    store(pool, 1, 2)
    store(pool, 3)
    store(pool, 4)
    touch(pool, 1, 2)

    store(pool, 5)
    store(pool, 6)

    assert pool.visible(chain(1, 2)) == [True, True]


def test_an_evicted_leaf_leaves_its_last_use_with_its_parent():
    pool = SmallPool(4, config=EXACT)
    store(pool, 1, 2)
    store(pool, 3)
    store(pool, 4)
    touch(pool, 1, 2)
    touch(pool, 3)
    touch(pool, 4)

    store(pool, 5)
    store(pool, 6)

    assert pool.visible([*chain(1, 2), *chain(3), *chain(4)]) == [False, False, True, True]


def test_a_lost_block_leaves_its_last_use_with_its_parent():
    pool = SmallPool(3, config=EXACT)
    store(pool, 1, 2)
    store(pool, 3)
    touch(pool, 1, 2)

    pool.lose_block(chain(1, 2)[1])
    store(pool, 4)
    store(pool, 5)

    assert pool.visible([*chain(1), *chain(3)]) == [True, False]


def test_what_is_below_a_lost_block_leaves_its_last_use_above_it():
    pool = SmallPool(4, config=EXACT)
    store(pool, 1, 2, 3)
    store(pool, 4)
    touch(pool, 1, 2, 3)

    pool.lose_block(chain(1, 2)[1])
    store(pool, 5)
    store(pool, 6)
    store(pool, 7)

    assert pool.visible([*chain(1), *chain(4)]) == [True, False]


def test_dormant_blocks_go_before_visible_ones():
    pool = SmallPool(3, config=EXACT)
    store(pool, 1)
    store(pool, 2, 3)
    touch(pool, 2, 3)
    pool.lose_block(chain(2)[0])
    store(pool, 4)

    store(pool, 5)

    assert pool.visible([*chain(1), *chain(4), *chain(5)]) == [True, True, True]
    assert pool.directory.explain(pool.namespace.id, chain(2, 3)[1]) == MissReason.EVICTED


def test_no_parent_goes_under_a_child_in_flight():
    pool = SmallPool(3, config=EXACT)
    store(pool, 1)
    store(pool, 2)
    pool.reserve(chain(1, 9))

    store(pool, 3)
    assert store(pool, 4) == [Want.WANTED]

    assert pool.visible(chain(1)) == [True]


def test_a_block_in_flight_does_not_go():
    pool = SmallPool(2)
    pool.reserve(chain(1, 2))

    assert store(pool, 3) == [Want.NO_ROOM]


def test_what_makes_room_for_a_chain_is_never_the_chain_itself():
    pool = SmallPool(4, config=EXACT)
    store(pool, 1, 2)
    store(pool, 7)
    store(pool, 8)

    assert store(pool, 1, 2, 3, 4) == [Want.EXISTS, Want.EXISTS, Want.WANTED, Want.WANTED]

    assert pool.visible(chain(1, 2, 3, 4)) == [True] * 4


def test_there_is_no_room_when_everything_is_held():
    pool = SmallPool(3, config=DirectoryConfig(lease_cap=1.0))
    store(pool, 1, 2)
    pool.directory.match(pool.namespace.id, b"".join(chain(1, 2)), lease_s=5.0)

    assert store(pool, 7, 8, 9) == [Want.WANTED, Want.NO_ROOM, Want.NO_ROOM]

    assert pool.visible([*chain(1, 2), *chain(7, 8)]) == [True, True, True, False]
    assert pool.directory.stats().refused_blocks == 2


def test_a_refused_sharded_block_gives_back_the_shards_that_had_found_room():
    sharded = make_namespace(shards=2)
    pool = SmallPool(3, namespaces=(sharded,))
    pool.store(chain(1))
    pin(pool, 1)
    before = pool.in_use()

    assert list(pool.reserve(chain(2)).wants) == [Want.NO_ROOM]

    assert pool.in_use() == before
    pool.directory.check_integrity()


def test_a_large_block_presses_out_several_small_ones():
    small, large = make_namespace(model="small"), make_namespace(pages=3, model="large")
    pool = SmallPool(4, namespaces=(small, large), config=EXACT)
    for token in range(4):
        pool.clock.advance(1.0)
        pool.store(chain(token), small)

    pool.store(chain(9), large)

    assert pool.visible([chain(token)[0] for token in range(4)], small) == [False, False, False, True]
    assert pool.visible(chain(9), large) == [True]


def test_a_crowded_node_is_given_a_hole_of_its_oldest_leaves():
    pool = SmallPool(6, 6, config=EXACT)
    for token in range(12):
        store(pool, token)
    result = pool.reserve(chain(20))
    (number, _), *_ = result.shares
    on_it = [token for token in range(1, 12) if segment_of(pool, token).number == number]

    pool.directory.abort(result.reservation, crowded=True)

    gone = [token for token in range(1, 12) if not pool.visible(chain(token))[0]]
    assert gone == on_it[: len(gone)]
    assert len(gone) >= 2


def test_a_crowded_node_keeps_what_is_held():
    pool = SmallPool(3, config=DirectoryConfig(lease_cap=1.0))
    store(pool, 1, 2)
    pool.directory.match(pool.namespace.id, b"".join(chain(1, 2)), lease_s=5.0)
    result = pool.reserve(chain(3))

    assert pool.directory.abort(result.reservation, crowded=True) == 1

    assert pool.visible(chain(1, 2)) == [True, True]


# Pins


def test_a_hard_pin_holds_a_chain_until_it_is_undone():
    pool = SmallPool(2)
    store(pool, 1, 2)
    assert pin(pool, 1, 2)
    pool.clock.advance(1e9)
    assert store(pool, 3) == [Want.NO_ROOM]

    assert pool.directory.unpin(pool.namespace.id, chain(1, 2)[1])
    assert not pool.directory.unpin(pool.namespace.id, chain(1, 2)[1])

    assert store(pool, 3) == [Want.WANTED]


def test_a_soft_pin_runs_out():
    pool = SmallPool(1)
    store(pool, 1)
    pin(pool, 1, ttl_s=10.0)
    assert store(pool, 2) == [Want.NO_ROOM]

    pool.clock.advance(10.0)

    assert store(pool, 2) == [Want.WANTED]


def test_a_pin_can_be_shortened():
    pool = SmallPool(1)
    store(pool, 1)
    pin(pool, 1)
    assert store(pool, 2) == [Want.NO_ROOM]

    pin(pool, 1, ttl_s=1.0)
    pool.clock.advance(1.0)

    assert store(pool, 2) == [Want.WANTED]


def test_unpinning_leaves_a_lease_as_it_was():
    pool = SmallPool(1, config=DirectoryConfig(lease_cap=1.0))
    store(pool, 1)
    pool.directory.match(pool.namespace.id, b"".join(chain(1)), lease_s=30.0)
    pin(pool, 1)

    pool.directory.unpin(pool.namespace.id, chain(1)[0])

    assert store(pool, 2) == [Want.NO_ROOM]


def test_what_is_not_there_cannot_be_pinned():
    pool = SmallPool(1)

    assert not pin(pool, 1)
    assert not pool.directory.unpin(pool.namespace.id, chain(1)[0])


# Where


def test_a_child_is_placed_with_its_parent():
    pool = SmallPool(100, 100)
    store(pool, 1)
    store(pool, 2)

    store(pool, 1, 3)
    store(pool, 2, 4)

    assert segment_of(pool, 1, 3) is segment_of(pool, 1)
    assert segment_of(pool, 2, 4) is segment_of(pool, 2)
    assert segment_of(pool, 1) is not segment_of(pool, 2)


def test_a_child_goes_elsewhere_when_its_parents_segment_is_fuller_than_the_mean():
    pool = SmallPool(100, 100)
    home, other = pool.segments
    pool.directory.set_accepting(other.segment_id, accepting=False)
    for token in range(15):
        store(pool, token)
    pool.directory.set_accepting(other.segment_id, accepting=True)

    store(pool, 0, 99)

    assert segment_of(pool, 0) is home
    assert segment_of(pool, 0, 99) is other


def test_in_a_full_pool_a_block_goes_where_the_oldest_leaf_was():
    pool = SmallPool(2, 2, config=EXACT)
    for token in range(4):
        store(pool, token)
    oldest = segment_of(pool, 0)
    touch(pool, 1)

    store(pool, 1, 9)

    assert segment_of(pool, 1) is not oldest
    assert segment_of(pool, 1, 9) is oldest
    assert pool.visible(chain(0)) == [False]


@pytest.mark.parametrize("age_slack", [0.0, 0.5])
def test_the_parents_segment_is_preferred_when_its_own_oldest_leaf_is_nearly_as_old(age_slack):
    pool = SmallPool(2, 2, config=DirectoryConfig(age_slack=age_slack))
    for token in range(4):
        store(pool, token)
    pool.clock.advance(100.0)
    home = segment_of(pool, 3)
    own_oldest = next(token for token in (1, 0) if segment_of(pool, token) is home)
    assert own_oldest == 1

    store(pool, 3, 9)

    assert (segment_of(pool, 3, 9) is home) == (age_slack > 0)
    assert pool.visible([chain(0)[0], chain(1)[0]]) == ([True, False] if age_slack else [False, True])


def test_unequal_nodes_fill_evenly():
    pool = SmallPool(1_000, 3_000)
    for token in range(700):
        pool.store(chain(token, 1, 2, 3))

        small, large = (pool.directory.segment(segment.number).fill for segment in pool.segments)
        assert abs(small - large) <= 0.05
    assert abs(small - large) <= 0.02


def test_nothing_is_pressed_out_of_a_draining_segment():
    pool = SmallPool(2, 2, config=EXACT)
    for token in range(4):
        store(pool, token)
    draining = segment_of(pool, 0)
    pool.directory.set_accepting(draining.segment_id, accepting=False)

    store(pool, 9)

    assert pool.visible(chain(0)) == [True]
    assert segment_of(pool, 9) is not draining


def test_there_is_no_room_without_a_segment():
    pool = SmallPool()

    assert list(pool.reserve(chain(1)).wants) == [Want.NO_ROOM]


def test_a_held_block_that_moved_to_another_segment_goes_when_its_hold_ends():
    """Its place in the first segment's queue must not undo its place in the second's."""
    pool = SmallPool(1, 1, config=DirectoryConfig(lease_cap=1.0))
    store(pool, 1)
    home = segment_of(pool, 1)
    other = next(segment for segment in pool.segments if segment is not home)
    copy = other.store(pool.namespace, chain(1)[0], b"", 0)
    assert pool.announce(other, [copy]) == [True]
    pool.directory.match(pool.namespace.id, b"".join(chain(1)), lease_s=5.0)
    pool.directory.set_accepting(other.segment_id, accepting=False)  # else its copy would go
    assert store(pool, 2) == [Want.NO_ROOM]
    pool.directory.set_accepting(other.segment_id, accepting=True)
    slot = next(iter(home.held.values()))
    pool.directory.gone(home.segment_id, pool.namespace.id, slot.hash, slot.slot, slot.generation)
    home.free(slot.slot, slot.generation)
    assert store(pool, 3) == [Want.WANTED]
    pin(pool, 3)
    assert store(pool, 4) == [Want.NO_ROOM]

    pool.clock.advance(60.0)

    assert store(pool, 4) == [Want.WANTED]


# Policies


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match="'fifo' is not known; use one of default, lru"):
        create_policy("fifo", BlockTable())


def test_an_empty_policy_offers_nothing():
    assert create_policy("lru", BlockTable()).first(0, 0, now_us=0) is None
