"""Draining a node: its blocks go to the others, most recently used first, and stay there when it has gone."""

from fake_node import SHARDED, FakeSegment, SmallPool, chain, make_namespace
from small_copies import GENEROUS, TTL_S, drain, rows, store_on_first, store_with_copy

from kvpool.core.directory import Drain
from kvpool.core.limits import PAGE_BYTES


def test_a_drained_node_can_go_without_loss():
    pool = SmallPool(10, 10, 10)
    chains = [chain(token, token + 1, token + 2) for token in range(0, 30, 10)]
    for hashes in chains:
        pool.store(hashes)
    leaving = pool.segments[0]
    assert leaving.held

    drain(pool, leaving.node_id)
    pool.lose(leaving.segment_id)

    assert all(all(pool.visible(hashes)) for hashes in chains)
    assert pool.directory.stats().surplus_blocks == 0


def test_what_a_drain_copied_is_no_surplus():
    """Else it would be the first to go, and lost when its node leaves."""
    pool = SmallPool(4, 4)
    store_on_first(pool, 1, 2)
    leaving = pool.slot_of(chain(1)[0])[0]

    drain(pool, leaving.node_id)

    staying = next(s for s in pool.directory.segments() if s.node_id != leaving.node_id)
    assert (staying.blocks, staying.surplus_blocks) == (2, 0)
    assert pool.directory.segment(leaving.number).surplus_blocks == 2


def test_a_copy_that_there_was_before_stays_when_its_first_holder_drains():
    pool = SmallPool(10, 10, config=GENEROUS)
    hashes = store_with_copy(pool, 1, 2)
    home = pool.directory._state.blocks.home_segment[rows(pool, hashes)[0]]
    leaving = next(segment for segment in pool.segments if segment.number == home)

    drain(pool, leaving.node_id)

    assert pool.copies() == []
    staying = next(s for s in pool.directory.segments() if s.number != home)
    assert staying.surplus_blocks == 0


def test_a_drain_copies_what_was_used_last_and_never_without_what_is_above_it():
    pool = SmallPool(10)
    for first in (10, 20, 30):
        pool.clock.advance(1.0)
        pool.store(chain(first, first + 1))
    pool.clock.advance(1.0)
    pool.directory.match(pool.namespace.id, b"".join(chain(10, 11)))
    pool.segments.append(FakeSegment(b"n" * 16, "node-9", 3 * PAGE_BYTES))
    pool.join(pool.segments[-1])

    job = drain(pool, "node-0")

    assert not job.has_room
    copied = {slot.hash for slot in pool.segments[-1].held.values()}
    assert copied == {*chain(10, 11), chain(30)[0]}


def test_a_drain_goes_on_after_a_copy_that_failed():
    pool = SmallPool(10, 10)
    store_on_first(pool, 1, 2)
    leaving = pool.segments[0]
    pool.directory.set_accepting(leaving.segment_id, accepting=False)
    job = Drain(leaving.node_id)
    job.begin(pool.directory.survey(leaving.node_id).in_order())
    while pool.directory.advance(job, TTL_S):
        pass
    [copy] = pool.copies()
    pool.directory.abort(copy.number)
    assert pool.directory.is_idle(job)

    drain(pool, leaving.node_id)
    pool.lose(leaving.segment_id)

    assert pool.visible(chain(1, 2)) == [True, True]


def test_a_drain_of_shards_moves_each():
    pool = SmallPool(10, 10, 10, namespaces=(SHARDED, make_namespace()))
    pool.store(chain(1, 2), SHARDED)
    pool.store(chain(5, 6), pool.namespaces[1])
    leaving = pool.slot_of(chain(1)[0], 0)[0]

    drain(pool, leaving.node_id)
    pool.lose(leaving.segment_id)

    assert pool.visible(chain(1, 2), SHARDED) == [True, True]
    assert pool.visible(chain(5, 6), pool.namespaces[1]) == [True, True]
