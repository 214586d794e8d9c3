"""Copies and lost segments: what is being emptied gives no copies, takes none, and hides none that stays."""

from fake_node import SmallPool, chain
from small_copies import GENEROUS, TTL_S, places, replicate, rows, store_on_first, store_with_copy

from kvpool.core.directory import CommitStatus, DirectoryConfig, Drain, Inventory, Want
from kvpool.core.limits import PAGE_BYTES


def close(pool, segment):
    """The segment is lost, and nothing of it is dropped yet."""
    pool.directory.lose_segment(segment.segment_id)


def home_of(pool, block_hash):
    number = pool.directory._state.blocks.home_segment[rows(pool, [block_hash])[0]]
    return next(segment for segment in pool.segments if segment.number == number)


def other_than(pool, segment):
    return next(s for s in pool.segments if s is not segment)


def test_surplus_copies_go_with_their_segment():
    pool = SmallPool(10, 10, config=GENEROUS)
    hashes = store_with_copy(pool, 1, 2, 3)
    lost = other_than(pool, home_of(pool, hashes[0]))

    close(pool, lost)
    left = [pool.directory.drop_lost(2), pool.directory.drop_lost(2)]

    assert left == [1, 0]
    assert pool.visible(hashes) == [True] * 3
    stats = pool.directory.stats()
    assert (stats.used_bytes, stats.surplus_blocks, stats.lost_blocks) == (3 * PAGE_BYTES, 0, 3)
    pool.directory.check_integrity()


def test_nothing_is_copied_to_a_lost_segment():
    pool = SmallPool(10, 10, config=GENEROUS)
    hashes = store_on_first(pool, 1, 2)
    replicate(pool, hashes)
    [copy] = pool.copies()

    close(pool, copy.destination)

    assert pool.directory.stats().copies == 0
    late = [(h, 0, i, 99, 0) for i, h in enumerate(hashes)]
    assert pool.directory.commit(copy.number, copy.destination.segment_id, late) == [CommitStatus.STALE] * 2
    assert replicate(pool, hashes) == 0
    assert pool.directory.drop_lost() == 0
    pool.directory.check_integrity()


def test_nothing_is_copied_from_a_lost_segment():
    pool = SmallPool(10, 10, config=GENEROUS)
    hashes = store_on_first(pool, 1, 2)
    lost = home_of(pool, hashes[0])
    drain = Drain(lost.node_id)
    drain.begin(pool.directory.survey(lost.node_id).in_order())
    close(pool, lost)

    assert replicate(pool, hashes) == 0
    while pool.directory.advance(drain, TTL_S):
        pass
    assert pool.copies() == []


def test_a_copy_under_way_from_a_lost_segment_becomes_the_block():
    pool = SmallPool(10, 10, config=GENEROUS)
    hashes = store_on_first(pool, 1, 2)
    replicate(pool, hashes)
    [copy] = pool.copies()
    close(pool, copy.source)

    assert pool.fetch(copy) == [CommitStatus.COMMITTED] * 2
    assert pool.directory.segment(copy.destination.number).surplus_blocks == 0, "it is not to be given up"
    assert pool.directory.drop_lost() == 0

    assert places(pool, hashes) == [{copy.destination.number}] * 2
    pool.directory.check_integrity()


def test_what_a_returning_node_announces_is_no_surplus_of_what_it_lost():
    pool = SmallPool(4)
    hashes = chain(1, 2, 3, 4)
    pool.store(hashes)
    [segment] = pool.segments
    close(pool, segment)
    number = pool.directory.add_segment(segment.segment_id, segment.node_id, segment.capacity_bytes)

    held = [slot.announced for slot in segment.held.values()]
    assert pool.directory.announce(segment.segment_id, pool.namespace.id, Inventory.of(held)).all()

    assert (pool.directory.segment(number).blocks, pool.directory.segment(number).surplus_blocks) == (4, 0)
    assert pool.directory.drop_lost() == 0
    assert pool.visible(hashes) == [True] * 4
    pool.directory.check_integrity()


def test_announced_copies_are_spared_as_long_as_earlier_leases_may_run():
    pool = SmallPool(4, 4, config=DirectoryConfig(spare_s=10.0, age_slack=0.0))
    hashes = store_on_first(pool, 1, 2, 3, 4)
    announced = [pool.slot_of(h)[1].announced for h in hashes]
    second = pool.segments[1]
    assert pool.directory.announce(second.segment_id, pool.namespace.id, Inventory.of(announced)).all()
    pool.directory.set_accepting(pool.segments[0].segment_id, accepting=False)

    assert set(pool.reserve(chain(9)).wants) == {Want.NO_ROOM}
    pool.clock.advance(10.1)
    assert set(pool.reserve(chain(9)).wants) == {Want.WANTED}

    assert pool.directory.stats().reclaimed_copies == 1
    assert pool.visible(hashes) == [True] * 4


def test_an_order_that_has_ended_keeps_no_inventory_from_being_taken_at_once():
    """A node acknowledges what it was sent: an ended copy's order is not, until another one follows."""
    pool = SmallPool(10, 10, config=GENEROUS)
    hashes = store_on_first(pool, 1)
    replicate(pool, hashes)
    pool.clock.advance(TTL_S + 1)
    pool.directory.expire()
    [outbox] = [outbox for outbox in pool.directory._state.outboxes.values() if len(outbox)]

    assert outbox.frees_nothing
