"""What the directory promises writers: who may write a block, and when it turns visible."""

import pytest
from fake_node import SHARDED, SmallPool, chain

from kvpool.core.directory import CommitStatus, MissReason, Want
from kvpool.core.limits import PAGE_BYTES

COMMITTED, STALE = CommitStatus.COMMITTED, CommitStatus.STALE
WANTED, EXISTS, IN_FLIGHT = Want.WANTED, Want.EXISTS, Want.IN_FLIGHT


# Reserving


def test_a_stored_chain_is_matched_as_far_as_it_goes(pool):
    hashes = chain(1, 2, 3)
    pool.store(hashes)

    matched = pool.directory.match(pool.namespace.id, b"".join([*hashes, *chain(9)]))

    assert (matched.blocks, matched.reason) == (3, MissReason.COLD)


def test_a_stored_block_is_not_wanted_again(pool):
    pool.store(chain(1, 2))

    result = pool.reserve(chain(1, 2, 3))

    assert list(result.wants) == [EXISTS, EXISTS, WANTED]
    assert [share.indexes for share in result.shares.values()] == [[2]]


def test_a_block_that_another_writer_is_at_is_not_wanted(pool):
    pool.reserve(chain(1, 2))

    result = pool.reserve(chain(1, 2, 3))

    assert list(result.wants) == [IN_FLIGHT, IN_FLIGHT, WANTED]


def test_nothing_wanted_opens_no_reservation(pool):
    pool.store(chain(1))

    result = pool.reserve(chain(1))

    assert (result.reservation, result.shares) == (0, {})
    assert pool.in_use() == (0, PAGE_BYTES)


def test_indexes_of_a_share_count_from_the_first_block_asked_for(pool):
    pool.store(chain(1, 2))

    result = pool.reserve(chain(1, 2, 3, 4), first=2)

    assert list(result.wants) == [WANTED, WANTED]
    assert [share.indexes for share in result.shares.values()] == [[0, 1]]


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_a_missing_ancestor_is_named_and_nothing_is_reserved(pool, stored):
    if stored:
        pool.store(chain(1, 2)[:stored])

    result = pool.reserve(chain(1, 2, 3, 4), first=3)

    assert (result.missing_from, result.wants, result.reservation) == (stored, b"", 0)
    assert pool.in_use() == (0, stored * PAGE_BYTES)


def test_a_missing_given_parent_is_minus_one(pool):
    result = pool.reserve(chain(1, 2)[1:], parent=chain(1)[0])

    assert result.missing_from == -1


def test_a_chain_can_continue_from_a_given_parent(pool):
    hashes = chain(1, 2, 3)
    pool.store(hashes[:1])

    result = pool.reserve(hashes[1:], parent=hashes[0])
    pool.commit(result, hashes, first=1)

    assert pool.visible(hashes) == [True, True, True]


def test_an_ancestor_in_flight_is_enough_to_go_on(pool):
    pool.reserve(chain(1, 2))

    result = pool.reserve(chain(1, 2, 3), first=2)

    assert (result.missing_from, list(result.wants)) == (None, [WANTED])


# Committing


def test_a_child_waits_for_its_parent(pool):
    hashes = chain(1, 2)
    parent, child = pool.reserve(hashes[:1]), pool.reserve(hashes, first=1)

    assert pool.commit(child, hashes, first=1) == [COMMITTED]
    assert pool.visible(hashes) == [False, False]
    assert pool.directory.explain(pool.namespace.id, hashes[1]) == MissReason.PARENT_MISSING

    assert pool.commit(parent, hashes) == [COMMITTED]
    assert pool.visible(hashes) == [True, True]


def test_the_late_commit_of_an_older_reservation_is_stale(pool):
    late = pool.reserve(chain(1), ttl_s=5.0)
    pool.clock.advance(5.0)

    taken_over = pool.reserve(chain(1))

    assert list(taken_over.wants) == [WANTED]
    assert pool.commit(late, chain(1)) == [STALE]
    assert pool.visible(chain(1)) == [False]
    assert pool.commit(taken_over, chain(1)) == [COMMITTED]
    assert pool.commit(late, chain(1)) == [STALE]
    assert pool.visible(chain(1)) == [True]


def test_a_reservation_holds_until_its_deadline(pool):
    pool.reserve(chain(1), ttl_s=5.0)
    pool.clock.advance(4.999)

    assert list(pool.reserve(chain(1)).wants) == [IN_FLIGHT]


def test_an_abandoned_reservation_gives_back_all_it_held(pool):
    result = pool.reserve(chain(1, 2, 3))
    assert pool.in_use() == (1, 3 * PAGE_BYTES)
    pool.clock.advance(30.0)

    pool.directory.expire()

    assert pool.in_use() == (0, 0)
    assert pool.directory.stats().expired_blocks == 3
    assert pool.commit(result, chain(1, 2, 3)) == [STALE] * 3


def test_committing_twice_is_stale(pool):
    result = pool.reserve(chain(1, 2))
    pool.commit(result, chain(1, 2))

    assert pool.commit(result, chain(1, 2)) == [STALE, STALE]
    assert pool.visible(chain(1, 2)) == [True, True]


def test_a_commit_from_a_segment_that_was_not_chosen_is_stale(pool):
    result = pool.reserve(chain(1))
    (number, _), *_ = result.shares
    other = next(segment for segment in pool.segments if segment.number != number)
    slot = other.store(pool.namespace, chain(1)[0], b"", 0)

    assert pool.directory.commit(result.reservation, other.segment_id, [slot.written]) == [STALE]
    assert pool.directory.commit(result.reservation, b"?" * 16, [slot.written]) == [STALE]
    assert pool.directory.commit(result.reservation + 1, other.segment_id, [slot.written]) == [STALE]


def test_abort_gives_back_some_blocks_or_all(pool):
    hashes = chain(1, 2, 3)
    result = pool.reserve(hashes)

    assert pool.directory.abort(result.reservation, [hashes[2]]) == 1
    assert pool.in_use() == (1, 2 * PAGE_BYTES)
    assert pool.directory.abort(result.reservation) == 2
    assert pool.in_use() == (0, 0)
    assert pool.directory.abort(result.reservation) == 0


def test_abort_counts_a_block_named_twice_once(pool):
    hashes = chain(1, 2)
    result = pool.reserve(hashes)

    assert pool.directory.abort(result.reservation, [hashes[1], hashes[1], chain(9)[0]]) == 1
    pool.directory.check_integrity()


def test_abort_leaves_what_is_committed(pool):
    hashes = chain(1, 2)
    first, second = pool.reserve(hashes[:1]), pool.reserve(hashes, first=1)
    pool.commit(first, hashes)

    assert pool.directory.abort(first.reservation) == 0
    assert pool.directory.abort(second.reservation) == 1
    assert pool.visible(hashes) == [True, False]


def test_children_of_an_aborted_block_wake_when_it_is_written_after_all(pool):
    hashes = chain(1, 2)
    parent, child = pool.reserve(hashes[:1]), pool.reserve(hashes, first=1)
    pool.commit(child, hashes, first=1)
    pool.directory.abort(parent.reservation)

    again = pool.reserve(hashes)

    assert list(again.wants) == [WANTED, EXISTS]
    pool.commit(again, hashes)
    assert pool.visible(hashes) == [True, True]


# Shards


def test_a_sharded_block_is_visible_with_its_last_shard():
    pool = SmallPool(10, namespaces=(SHARDED,))
    result = pool.reserve(chain(1, 2))
    assert {shard for _, shard in result.shares} == {0, 1}

    pool.commit_share(result, 0, 1, chain(1, 2))
    assert pool.visible(chain(1, 2)) == [False, False]

    pool.commit_share(result, 0, 0, chain(1, 2))
    assert pool.visible(chain(1, 2)) == [True, True]


def test_what_one_rank_drops_is_aborted_for_all():
    pool = SmallPool(10, namespaces=(SHARDED,))
    result = pool.reserve(chain(1))
    pool.commit_share(result, 0, 0, chain(1))

    pool.directory.abort(result.reservation)
    pool.obey()

    assert pool.in_use() == (0, 0)
    assert pool.segments[0].held == {}


def test_a_lost_shard_makes_the_block_dormant_and_is_written_again():
    pool = SmallPool(10, namespaces=(SHARDED,))
    hashes = chain(1, 2)
    pool.store(hashes)
    pool.lose_block(hashes[0], shard=1)
    assert pool.visible(hashes) == [False, False]

    result = pool.reserve(hashes)

    assert list(result.wants) == [WANTED, EXISTS]
    pool.commit(result, hashes)
    assert pool.visible(hashes) == [True, True]
    pool.obey()
    assert sorted((slot.hash, slot.shard) for slot in pool.segments[0].held.values()) == sorted(
        (block_hash, shard) for block_hash in hashes for shard in (0, 1)
    )


def test_a_chain_stays_near_its_parent_and_a_new_branch_may_lie_anywhere():
    pool = SmallPool(100, 100, 100)
    trunk = chain(1, 2)
    pool.store(trunk)
    pool.store(chain(1, 2, 3))
    home = pool.slot_of(trunk[-1])[0]
    assert pool.slot_of(chain(1, 2, 3)[-1])[0] is home, "the first child continues the chain"

    branches = [chain(1, 2, token, 9) for token in range(10, 16)]
    for branch in branches:
        pool.store(branch)

    homes = [[pool.slot_of(block)[0] for block in branch[2:]] for branch in branches]
    assert all(head is tail for head, tail in homes), "each goes on where it began"
    assert {head.node_id for head, _ in homes} == {"node-0", "node-1", "node-2"}
