"""Nodes that come, go and lose blocks: what stays visible, and what an inventory brings back."""

import pytest
from fake_node import SHARDED, SmallPool, chain

from kvpool.core.directory import CommitStatus, MissReason, Want
from kvpool.core.limits import PAGE_BYTES

COMMITTED, STALE = CommitStatus.COMMITTED, CommitStatus.STALE
WANTED, EXISTS = Want.WANTED, Want.EXISTS


def test_losing_a_segment_leaves_its_descendants_dormant():
    pool = SmallPool(10, 10)
    hashes = chain(1, 2, 3)
    pool.store(hashes[:1])
    pool.directory.set_accepting(pool.slot_of(hashes[0])[0].segment_id, accepting=False)
    pool.store(hashes)
    home, _ = pool.slot_of(hashes[0])

    assert pool.lose(home.segment_id) == 1

    assert pool.visible(hashes) == [False, False, False]
    assert pool.directory.explain(pool.namespace.id, hashes[0]) == MissReason.NODE_DOWN
    assert pool.directory.explain(pool.namespace.id, hashes[1]) == MissReason.PARENT_MISSING
    assert list(pool.reserve(hashes).wants) == [WANTED, EXISTS, EXISTS]
    assert pool.lose(home.segment_id) == 0


def test_what_was_in_flight_on_a_lost_segment_can_be_written_elsewhere(pool):
    result = pool.reserve(chain(1))
    (number, _), *_ = result.shares
    lost = next(segment for segment in pool.segments if segment.number == number)

    assert pool.lose(lost.segment_id) == 1
    assert pool.in_use() == (0, 0)
    pool.join(lost)

    assert pool.commit(pool.reserve(chain(1)), chain(1)) == [COMMITTED]
    slot = lost.store(pool.namespace, chain(1)[0], b"", 0)
    assert pool.directory.commit(result.reservation, lost.segment_id, [slot.written]) == [STALE]


def test_a_block_in_flight_goes_whole_when_one_of_its_shards_is_lost():
    pool = SmallPool(1, 1, namespaces=(SHARDED,))
    result = pool.reserve(chain(1))
    assert len({number for number, _ in result.shares}) == 2
    (kept, shard), (lost, _) = result.shares
    pool.commit_share(result, kept, shard, chain(1))

    pool.lose(next(s for s in pool.segments if s.number == lost).segment_id)

    assert pool.in_use() == (0, 0)
    pool.obey()
    assert [len(segment.held) for segment in pool.segments] == [0, 0]


def test_orders_that_wait_for_a_grant_go_with_their_segment():
    pool = SmallPool(10)
    pool.store(chain(1, 2))
    (segment,) = pool.segments
    _, slot = pool.slot_of(chain(1, 2)[1])
    pool.directory.report_bad(segment.segment_id, pool.namespace.id, slot.hash, slot.slot, slot.generation)
    assert list(pool.directory._state.freed) == [segment.number]

    pool.lose(segment.segment_id)

    assert pool.directory._state.freed == {}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_an_inventory_brings_chains_back_in_any_order(order):
    pool = SmallPool(10)
    hashes = chain(1, 2, 3)
    pool.store(hashes)
    (segment,) = pool.segments
    pool.lose(segment.segment_id)
    pool.join(segment)
    slots = [pool.slot_of(hashes[i])[1] for i in order]

    for slot in slots:
        assert pool.announce(segment, [slot]) == [True]

    assert pool.visible(hashes) == [True, True, True]
    assert pool.in_use() == (0, 3 * PAGE_BYTES)


def test_an_announced_orphan_wakes_when_its_parent_is_written(pool):
    hashes = chain(1, 2)
    slot = pool.segments[0].store(pool.namespace, hashes[1], hashes[0], 0)
    pool.announce(pool.segments[0], [slot])
    assert pool.visible(hashes) == [False, False]

    result = pool.reserve(hashes)

    assert list(result.wants) == [WANTED, EXISTS]
    pool.commit(result, hashes)
    assert pool.visible(hashes) == [True, True]


def test_a_sharded_block_comes_back_from_several_inventories():
    pool = SmallPool(10, 10, namespaces=(SHARDED,))
    left, right = pool.segments
    slots = [left.store(SHARDED, chain(1)[0], b"", 0), right.store(SHARDED, chain(1)[0], b"", 1)]

    pool.announce(left, slots[:1])
    assert pool.visible(chain(1)) == [False]
    pool.announce(right, slots[1:])
    assert pool.visible(chain(1)) == [True]


def test_an_inventory_is_refused_what_the_directory_cannot_take(pool):
    pool.store(chain(1, 2))
    pool.reserve(chain(5))
    home, _ = pool.slot_of(chain(1)[0])
    segment = next(segment for segment in pool.segments if segment is not home)
    in_flight = segment.store(pool.namespace, chain(5)[0], b"", 0)
    reparented = segment.store(pool.namespace, chain(1, 2)[1], b"", 0)
    no_such_shard = segment.store(pool.namespace, chain(6)[0], b"", 1)

    assert pool.announce(segment, [in_flight, reparented, no_such_shard]) == [False, False, False]

    pool.directory.check_integrity()
    assert pool.visible(chain(1, 2)) == [True, True]


def test_an_inventory_does_not_add_to_a_block_in_flight():
    pool = SmallPool(10, 10, namespaces=(SHARDED,))
    result = pool.reserve(chain(1))
    (number, _), *_ = result.shares
    pool.commit_share(result, number, 0, chain(1))
    other = next(segment for segment in pool.segments if segment.number != number)

    assert pool.announce(other, [other.store(SHARDED, chain(1)[0], b"", 0)]) == [False]

    assert pool.commit_share(result, number, 1, chain(1)) == [COMMITTED]
    assert pool.visible(chain(1)) == [True]


def test_all_children_of_a_lost_block_turn_dormant_and_wake_again(pool):
    children = [chain(1, token) for token in range(3)]
    for hashes in children:
        pool.store(hashes)

    pool.lose_block(chain(1)[0])
    assert [pool.visible(hashes) for hashes in children] == [[False, False]] * 3

    pool.store(chain(1))
    assert [pool.visible(hashes) for hashes in children] == [[True, True]] * 3


def test_an_inventory_is_refused_what_its_segment_has_already(pool):
    pool.store(chain(1))
    segment, _ = pool.slot_of(chain(1)[0])
    second = segment.store(pool.namespace, chain(1)[0], b"", 0)

    assert pool.announce(segment, [second]) == [False]


def test_an_inventory_is_refused_what_does_not_fit(pool):
    segment = SmallPool(1, 1).segments[0]
    small = SmallPool(1)
    slots = [segment.store(small.namespace, chain(i)[0], b"", 0) for i in range(2)]

    assert small.announce(small.segments[0], slots) == [True, False]
    assert small.in_use() == (0, PAGE_BYTES)


def test_a_second_copy_keeps_the_block_visible_when_the_first_is_lost(pool):
    pool.store(chain(1, 2))
    home, _ = pool.slot_of(chain(1)[0])
    other = next(segment for segment in pool.segments if segment is not home)
    copies = [other.store(pool.namespace, h, p, 0) for h, p in zip(chain(1, 2), [b"", chain(1)[0]], strict=True)]
    assert pool.announce(other, copies) == [True, True]
    assert pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2))).block.tolist() == [0, 0, 1, 1]

    pool.lose(home.segment_id)

    assert pool.visible(chain(1, 2)) == [True, True]
    assert pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2))).segment.tolist() == [other.number] * 2


def test_a_report_counts_for_exactly_one_slot_and_generation(pool):
    pool.store(chain(1))
    segment, slot = pool.slot_of(chain(1)[0])
    named = (segment.segment_id, pool.namespace.id, slot.hash)

    assert not pool.directory.gone(*named, slot.slot, slot.generation + 1)
    assert not pool.directory.report_bad(*named, slot.slot + 1, slot.generation)
    assert not pool.directory.gone(b"?" * 16, pool.namespace.id, slot.hash, slot.slot, slot.generation)
    assert pool.visible(chain(1)) == [True]
    assert pool.directory.gone(*named, slot.slot, slot.generation)
    assert not pool.directory.gone(*named, slot.slot, slot.generation)
    assert pool.visible(chain(1)) == [False]


def test_a_bad_block_can_be_saved_again_at_once(pool):
    pool.store(chain(1))
    segment, slot = pool.slot_of(chain(1)[0])

    pool.directory.report_bad(segment.segment_id, pool.namespace.id, slot.hash, slot.slot, slot.generation)

    assert pool.directory.stats().bad_blocks == 1
    assert list(pool.reserve(chain(1)).wants) == [WANTED]


def test_a_draining_segment_takes_nothing_new(pool):
    draining, other = pool.segments
    pool.store(chain(1))
    pool.directory.set_accepting(draining.segment_id, accepting=False)

    result = pool.reserve(chain(1, 2, 3, 4))

    assert {number for number, _ in result.shares} == {other.number}
