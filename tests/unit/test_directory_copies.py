"""Copies of blocks on several nodes: how they come about, what they are worth, and in which order they go."""

import pytest
from fake_node import SHARDED, SmallPool, chain
from small_copies import GENEROUS, TTL_S, places, replicate, rows, store_on_first, store_with_copy

from kvpool.core.directory import CommitStatus, DirectoryConfig, HotRun, MissReason, Want
from kvpool.core.directory.copying import COPIES_OPEN_MAX, COPY_BLOCKS_MAX
from kvpool.core.limits import PAGE_BYTES

COMMITTED, STALE = CommitStatus.COMMITTED, CommitStatus.STALE


@pytest.fixture
def pool():
    return SmallPool(10, 10, config=GENEROUS)


# A copy on its way


def test_a_copy_is_offered_when_it_is_committed_and_not_before(pool):
    hashes = store_on_first(pool, 1, 2, 3)

    assert replicate(pool, hashes) == 3
    before = places(pool, hashes)
    [copy] = pool.copies()
    pool.directory.check_integrity()
    assert pool.directory.stats().used_bytes == 6 * PAGE_BYTES, "its room is promised"
    assert pool.fetch(copy) == [COMMITTED] * 3

    assert before == [{copy.source.number}] * 3
    assert places(pool, hashes) == [{copy.source.number, copy.destination.number}] * 3
    assert pool.directory.stats().used_bytes == 6 * PAGE_BYTES
    assert (pool.directory.stats().copies, pool.directory.stats().surplus_blocks) == (0, 3)


def test_an_order_to_fetch_says_where_the_blocks_lie(pool):
    hashes = store_on_first(pool, 1, 2)
    replicate(pool, hashes)

    [copy] = pool.copies()

    segment, _ = pool.slot_of(hashes[0])
    held = [pool.slot_of(h)[1] for h in hashes]
    assert copy.source.segment_id == segment.segment_id
    assert (copy.hashes, copy.parents) == (hashes, [b"", hashes[0]])
    assert copy.slots.tolist() == [slot.slot for slot in held]
    assert copy.generations.tolist() == [slot.generation for slot in held]
    assert copy.checksums.tolist() == [slot.checksum for slot in held]


def test_what_is_not_fetched_in_time_is_given_up(pool):
    hashes = store_on_first(pool, 1, 2)
    replicate(pool, hashes)
    [copy] = pool.copies()

    pool.clock.advance(TTL_S + 1)
    pool.directory.expire()

    assert pool.in_use() == (0, 2 * PAGE_BYTES)
    assert pool.directory.commit(copy.number, copy.destination.segment_id, [pool.slot_of(hashes[0])[1].written]) == [
        STALE
    ]
    pool.directory.check_integrity()


def test_a_node_gives_back_what_it_cannot_fetch(pool):
    hashes = store_on_first(pool, 1, 2, 3)
    replicate(pool, hashes)
    [copy] = pool.copies()

    assert pool.directory.abort(copy.number, [hashes[1], chain(9)[0]]) == 1
    assert pool.fetch(copy) == [COMMITTED] * 2
    assert pool.directory.abort(copy.number) == 0

    assert pool.in_use() == (0, 5 * PAGE_BYTES)
    assert [len(held) for held in places(pool, hashes)] == [2, 1, 2]


def test_a_copy_of_a_block_that_went_is_not_taken(pool):
    hashes = store_on_first(pool, 1, 2)
    replicate(pool, hashes)
    [copy] = pool.copies()
    segment, slot = pool.slot_of(hashes[1])
    destination = pool.segments[1]
    late = destination.store(pool.namespace, hashes[1], hashes[0], 0)

    segment.free(slot.slot, slot.generation)
    pool.directory.gone(segment.segment_id, pool.namespace.id, hashes[1], slot.slot, slot.generation)

    assert pool.directory.commit(copy.number, destination.segment_id, [late.written]) == [STALE]
    pool.directory.check_integrity()
    assert len(copy.rows) == 1


def test_a_copy_brings_back_a_shard_that_was_lost_meanwhile():
    pool = SmallPool(10, 10, 10, namespaces=(SHARDED,), config=GENEROUS)
    pool.store(chain(1), SHARDED)
    assert replicate(pool, chain(1)) == 1
    [copy] = pool.copies()
    pool.lose_block(chain(1)[0], copy.shard)
    assert pool.visible(chain(1)) == [False]

    assert pool.fetch(copy) == [COMMITTED]

    assert pool.visible(chain(1)) == [True]
    pool.directory.check_integrity()


def test_a_copy_ends_with_the_segment_that_it_goes_to(pool):
    hashes = store_on_first(pool, 1, 2)
    replicate(pool, hashes)
    [copy] = pool.copies()

    assert pool.lose(copy.destination.segment_id) == 0

    assert pool.directory.copy(copy.number) is None
    assert pool.visible(hashes) == [True, True]
    pool.directory.check_integrity()


def test_a_copy_comes_only_to_where_it_was_ordered(pool):
    pool.store(chain(1))
    replicate(pool, chain(1))
    [copy] = pool.copies()
    elsewhere = pool.slot_of(chain(1)[0])

    assert pool.directory.commit(copy.number, elsewhere[0].segment_id, [elsewhere[1].written]) == [STALE]
    assert pool.copies() == [copy]


# What a copy is worth


def test_the_loss_of_the_first_holder_is_nobodys_loss(pool):
    hashes = store_with_copy(pool, 1, 2, 3)
    first = pool.directory._state.blocks.home_segment[rows(pool, hashes)[0]]
    home = next(segment for segment in pool.segments if segment.number == first)

    assert pool.lose(home.segment_id) == 3

    assert pool.visible(hashes) == [True] * 3
    assert pool.directory.stats().surplus_blocks == 0, "what was surplus is all there is"
    pool.directory.check_integrity()


def test_a_bad_copy_goes_alone(pool):
    hashes = store_with_copy(pool, 1)
    segment, slot = pool.slot_of(hashes[0])

    pool.directory.report_bad(segment.segment_id, pool.namespace.id, slot.hash, slot.slot, slot.generation)

    assert pool.visible(hashes) == [True]
    assert [len(held) for held in places(pool, hashes)] == [1]
    pool.directory.check_integrity()


# The order in which they go


def test_copies_go_before_anything_that_has_no_other():
    pool = SmallPool(4, 4, config=GENEROUS)
    hot = store_with_copy(pool, 1, 2)
    for token in range(10, 14):
        pool.store(chain(token))
    assert pool.directory.stats().used_bytes == 8 * PAGE_BYTES

    for token in (20, 21):
        assert list(pool.store(chain(token)).wants) == [Want.WANTED]

    assert all(pool.visible([*hot, *[chain(token)[0] for token in range(10, 14)]]))
    assert pool.directory.stats().reclaimed_copies == 2
    assert pool.directory.stats().evicted_blocks == 0
    pool.directory.check_integrity()
    pool.store(chain(22))
    assert pool.directory.stats().evicted_blocks == 1, "when no copy is left, the oldest leaf goes"


def test_dormant_blocks_go_before_copies():
    pool = SmallPool(3, 3, config=GENEROUS)
    hot = store_with_copy(pool, 1)
    pool.store(chain(2, 3))
    pool.lose_block(chain(2)[0])
    pool.store(chain(4))
    pool.store(chain(5))
    pool.store(chain(6))

    pool.store(chain(7))

    assert [len(held) for held in places(pool, hot)] == [2]
    assert pool.directory.explain(pool.namespace.id, chain(2, 3)[1]) == MissReason.EVICTED


def test_the_oldest_copy_goes_first():
    pool = SmallPool(6, 6, config=GENEROUS)
    old, new = store_with_copy(pool, 1), store_with_copy(pool, 2)
    free_pages = 12 - pool.directory.stats().used_bytes // PAGE_BYTES
    for token in range(10, 10 + free_pages):
        pool.store(chain(token))

    pool.store(chain(99))

    assert [len(held) for held in places(pool, old) + places(pool, new)] == [1, 2]
    assert pool.directory.stats().reclaimed_copies == 1


def test_a_held_blocks_copies_may_go_but_not_the_block():
    pool = SmallPool(1, 1, config=DirectoryConfig(replica_budget=1.0, lease_cap=1.0))
    hot = store_with_copy(pool, 1)
    pool.directory.match(pool.namespace.id, b"".join(hot), lease_s=10.0)

    assert list(pool.store(chain(2)).wants) == [Want.WANTED]
    pool.directory.pin(pool.namespace.id, chain(2)[0])

    assert list(pool.reserve(chain(3)).wants) == [Want.NO_ROOM]
    assert pool.visible([*hot, *chain(2)]) == [True, True]


def test_a_crowded_segment_gives_up_its_copies_first(pool):
    hot = store_with_copy(pool, 1, 2)
    pool.directory.set_accepting(pool.segments[0].segment_id, accepting=False)
    pool.store(chain(7))
    result = pool.reserve(chain(7, 8))

    pool.directory.abort(result.reservation, chain(7, 8)[1:], crowded=True)

    assert pool.directory.stats().reclaimed_copies == 2
    assert all(pool.visible(hot))
    assert pool.visible(chain(7)) == [False], "a hole takes more than the copies"


# Where copies are made


def test_nothing_is_copied_where_there_is_one_node():
    pool = SmallPool(10, config=GENEROUS)
    pool.store(chain(1))

    assert replicate(pool, chain(1)) == 0


def test_a_further_copy_goes_to_a_further_node():
    pool = SmallPool(10, 10, 10, config=GENEROUS)
    hashes = store_with_copy(pool, 1, 2)

    assert replicate(pool, hashes) == 0, "two are enough"
    assert replicate(pool, hashes, copies=3) == 2
    assert replicate(pool, hashes, copies=3) == 0, "it is on its way"
    [copy] = pool.copies()
    pool.fetch(copy)

    assert [len(held) for held in places(pool, hashes)] == [3, 3]


def test_copies_keep_to_their_part_of_the_free_space():
    pool = SmallPool(10, 10, config=DirectoryConfig(replica_budget=0.5))
    hashes = chain(*range(8))
    pool.store(hashes)
    free_pages = {s.number: s.free_bytes // PAGE_BYTES for s in pool.directory.segments()}

    ordered = replicate(pool, hashes)

    [copy] = pool.copies()
    assert ordered == free_pages[copy.destination.number] // 2
    assert replicate(pool, hashes) <= free_pages[copy.source.number] // 2


def test_a_chain_on_several_segments_is_copied_from_each():
    pool = SmallPool(4, 4, 20, config=GENEROUS)
    pool.directory.set_accepting(pool.segments[2].segment_id, accepting=False)
    hashes = chain(*range(6))
    pool.store(hashes)
    pool.directory.set_accepting(pool.segments[2].segment_id, accepting=True)
    assert len({pool.slot_of(h)[0].number for h in hashes}) == 2

    while replicate(pool, hashes):
        pass
    for copy in pool.copies():
        assert pool.fetch(copy) == [COMMITTED] * len(copy.hashes)

    assert [len(held) for held in places(pool, hashes)] == [2] * 6
    pool.directory.check_integrity()


def test_what_is_no_chain_any_more_is_not_copied(pool):
    pool.store(chain(1, 2))
    pool.store(chain(3))
    stale = (*rows(pool, chain(1)), *rows(pool, chain(3)))

    assert pool.directory.replicate(HotRun(stale, 2), TTL_S) == 1
    assert [copy.hashes for copy in pool.copies()] == [chain(1)]


def test_a_node_has_few_copies_to_make_at_a_time():
    pool = SmallPool(4 * COPY_BLOCKS_MAX * COPIES_OPEN_MAX, 8 * COPY_BLOCKS_MAX * COPIES_OPEN_MAX, config=GENEROUS)
    pool.directory.set_accepting(pool.segments[1].segment_id, accepting=False)
    hashes = chain(*range((COPIES_OPEN_MAX + 1) * COPY_BLOCKS_MAX))
    pool.store(hashes)
    pool.directory.set_accepting(pool.segments[1].segment_id, accepting=True)

    while replicate(pool, hashes):
        pass

    assert [len(copy.hashes) for copy in pool.copies()] == [COPY_BLOCKS_MAX] * COPIES_OPEN_MAX


def test_copies_make_no_pool_full():
    """They give way to whatever comes, so matches are not shortened for them."""
    pool = SmallPool(10, 10, config=DirectoryConfig(replica_budget=1.0, lease_cap=0.1, pressure=0.5))
    hashes = store_with_copy(pool, *range(8))

    assert pool.directory.stats().used_bytes > 0.5 * pool.directory.stats().capacity_bytes
    assert pool.directory.match(pool.namespace.id, b"".join(hashes), lease_s=5.0).blocks == 8
