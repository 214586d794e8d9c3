"""What the directory promises writers, readers and nodes. Eviction, leases and orders have files of their own."""

import pytest
from fake_node import SmallPool, chain, make_namespace

from kvpool.core.directory import CommitStatus, DirectoryConfig, MissReason, Want
from kvpool.core.errors import InvalidHashError, NamespaceMismatchError, UnknownNamespaceError, UsageError
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX, PAGE_BYTES, RESERVE_BLOCKS_MAX

COMMITTED, STALE = CommitStatus.COMMITTED, CommitStatus.STALE
WANTED, EXISTS, IN_FLIGHT = Want.WANTED, Want.EXISTS, Want.IN_FLIGHT
SHARDED = make_namespace(shards=2)


@pytest.fixture
def pool():
    """Two segments of ten pages; nothing has to go."""
    return SmallPool(10, 10)


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


# Misuse


@pytest.mark.parametrize(
    "call",
    [
        lambda directory, ns: directory.match(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.locate(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.reserve(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.explain(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.pin(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.unpin(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.announce(bytes(16), ns, []),
        lambda directory, ns: directory.gone(bytes(16), ns, bytes(HASH_BYTES), 0, 1),
        lambda directory, ns: directory.namespace(ns),
    ],
)
def test_an_unknown_namespace_is_named(pool, call):
    with pytest.raises(UnknownNamespaceError, match="namespace 3f3f3f3f"):
        call(pool.directory, b"?" * 32)


@pytest.mark.parametrize("hashes", [b"", bytes(31), bytes(HASH_BYTES + 1), bytes(HASH_BYTES * (MATCH_BLOCKS_MAX + 1))])
@pytest.mark.parametrize("call", ["match", "locate", "reserve"])
def test_hashes_that_cannot_be_a_chain_are_refused(pool, call, hashes):
    with pytest.raises(InvalidHashError):
        getattr(pool.directory, call)(pool.namespace.id, hashes)


@pytest.mark.parametrize("call", ["match", "locate", "reserve"])
@pytest.mark.parametrize("first", [-1, 2])
def test_the_first_block_must_be_one_of_the_chain(pool, call, first):
    with pytest.raises(InvalidHashError, match=f"first is {first}"):
        getattr(pool.directory, call)(pool.namespace.id, b"".join(chain(1, 2)), first)


def test_one_reserve_takes_so_many_blocks_and_no_more(pool):
    hashes = chain(*range(RESERVE_BLOCKS_MAX + 1))

    with pytest.raises(InvalidHashError, match=f"{RESERVE_BLOCKS_MAX} blocks at a time"):
        pool.reserve(hashes)
    assert pool.reserve(hashes, first=1).missing_from == 0


def test_a_hash_that_stands_twice_is_refused(pool):
    with pytest.raises(InvalidHashError, match="twice"):
        pool.reserve(chain(1, 2) + chain(1, 2))
    assert pool.in_use() == (0, 0)


def test_a_block_given_below_another_parent_is_refused_and_nothing_leaks(pool):
    pool.store(chain(1, 2))
    before = pool.in_use()

    with pytest.raises(NamespaceMismatchError, match=r"hashes\[2\] is stored below another parent"):
        pool.reserve([*chain(7, 8), chain(1, 2)[1]])

    assert pool.in_use() == before
    assert pool.visible(chain(7, 8)) == [False, False]
    pool.directory.check_integrity()


def test_a_refused_chain_does_not_hurt_the_next_one(pool):
    pool.store(chain(1, 2))
    with pytest.raises(NamespaceMismatchError):
        pool.reserve([chain(1, 2)[1]])

    pool.store(chain(7, 8))

    assert pool.visible(chain(7, 8)) == [True, True]


def test_a_chain_cannot_be_stored_below_itself(pool):
    """A ring of blocks would have no leaf: nothing could ever evict it."""
    hashes = chain(1, 2, 3)
    pool.store(hashes)
    pool.lose_block(hashes[0])
    before = pool.in_use()

    with pytest.raises(NamespaceMismatchError, match="below the chain"):
        pool.reserve([*chain(8), hashes[0]], parent=hashes[2])

    assert pool.in_use() == before
    assert list(pool.reserve(hashes).wants) == [WANTED, EXISTS, EXISTS]


def test_an_inventory_cannot_close_a_ring(pool):
    segment = pool.segments[0]
    one, two, three = chain(1)[0], chain(2)[0], chain(3)[0]
    slots = [
        segment.store(pool.namespace, one, two, 0),
        segment.store(pool.namespace, two, one, 0),
        segment.store(pool.namespace, three, three, 0),
    ]

    assert pool.announce(segment, slots) == [True, False, False]
    pool.directory.check_integrity()


def test_a_segment_joins_once(pool):
    with pytest.raises(UsageError, match="open already"):
        pool.join(pool.segments[0])


def test_a_segment_has_a_capacity(pool):
    with pytest.raises(UsageError, match="0 bytes"):
        pool.directory.add_segment(b"new" * 5 + b"!", "node-9", 0)


# Reading


class CountingBytes(bytes):
    """A packed chain that counts how often a part of it is looked at."""

    looks = 0

    def __getitem__(self, key):
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("stored", [0, 1, 100, 4_095, 4_096])
def test_a_match_looks_at_a_logarithm_of_the_chain(stored):
    pool = SmallPool(5_000)
    hashes = chain(*range(4_096))
    if stored:
        pool.store(hashes[:stored])

    packed = CountingBytes(b"".join(hashes))
    matched = pool.directory.match(pool.namespace.id, packed)

    assert matched.blocks == stored
    assert 0 < packed.looks <= 2 * 12 + 4


def test_locate_names_slot_generation_and_checksum_of_each_block(pool):
    hashes = chain(1, 2, 3)
    pool.store(hashes)

    found = pool.directory.locate(pool.namespace.id, b"".join(hashes), first=1)

    assert (found.blocks, found.block.tolist(), found.reason) == (2, [0, 1], None)
    for i, block_hash in enumerate(hashes[1:]):
        segment, slot = pool.slot_of(block_hash)
        assert found.segment[i] == segment.number
        assert (found.slot[i], found.generation[i], found.checksum[i]) == (slot.slot, slot.generation, slot.checksum)


def test_locate_gives_one_rank_its_shard_only():
    pool = SmallPool(10, namespaces=(SHARDED,))
    pool.store(chain(1, 2))

    whole = pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2)))
    rank = pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2)), shard=1)

    assert sorted(zip(whole.block.tolist(), whole.shard.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (rank.blocks, rank.block.tolist(), rank.shard.tolist()) == (2, [0, 1], [1, 1])


def test_locate_stops_where_the_chain_does(pool):
    pool.store(chain(1))

    found = pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2, 3)))
    beyond = pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2, 3)), first=2)

    assert (found.blocks, found.reason) == (1, MissReason.COLD)
    assert (beyond.blocks, len(beyond.slot)) == (0, 0)


def test_namespaces_do_not_see_each_other():
    left, right = make_namespace(model="left"), make_namespace(model="right")
    pool = SmallPool(10, namespaces=(left, right))
    pool.store(chain(1, 2), left)

    assert pool.visible(chain(1, 2), left) == [True, True]
    assert pool.visible(chain(1, 2), right) == [False, False]
    assert list(pool.reserve(chain(1, 2), right).wants) == [WANTED, WANTED]


def test_opening_a_namespace_again_changes_nothing(pool):
    pool.store(chain(1))

    pool.directory.open_namespace(pool.namespace)

    assert pool.directory.namespaces() == [pool.namespace]
    assert pool.visible(chain(1)) == [True]


# Nodes


def test_losing_a_segment_leaves_its_descendants_dormant():
    pool = SmallPool(10, 10)
    hashes = chain(1, 2, 3)
    pool.store(hashes[:1])
    pool.directory.set_accepting(pool.slot_of(hashes[0])[0].segment_id, accepting=False)
    pool.store(hashes)
    home, _ = pool.slot_of(hashes[0])

    assert pool.directory.lose_segment(home.segment_id) == 1

    assert pool.visible(hashes) == [False, False, False]
    assert pool.directory.explain(pool.namespace.id, hashes[0]) == MissReason.NODE_DOWN
    assert pool.directory.explain(pool.namespace.id, hashes[1]) == MissReason.PARENT_MISSING
    assert list(pool.reserve(hashes).wants) == [WANTED, EXISTS, EXISTS]
    assert pool.directory.lose_segment(home.segment_id) == 0


def test_what_was_in_flight_on_a_lost_segment_can_be_written_elsewhere(pool):
    result = pool.reserve(chain(1))
    (number, _), *_ = result.shares
    lost = next(segment for segment in pool.segments if segment.number == number)

    assert pool.directory.lose_segment(lost.segment_id) == 1
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

    pool.directory.lose_segment(next(s for s in pool.segments if s.number == lost).segment_id)

    assert pool.in_use() == (0, 0)
    pool.obey()
    assert [len(segment.held) for segment in pool.segments] == [0, 0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_an_inventory_brings_chains_back_in_any_order(order):
    pool = SmallPool(10)
    hashes = chain(1, 2, 3)
    pool.store(hashes)
    (segment,) = pool.segments
    pool.directory.lose_segment(segment.segment_id)
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

    pool.directory.lose_segment(home.segment_id)

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


# Why it was a miss


def test_every_way_out_leaves_its_reason(pool):
    explain = pool.directory.explain
    ns = pool.namespace.id
    reasons = {}

    reasons["never stored"] = explain(ns, chain(9)[0])
    pool.reserve(chain(1), ttl_s=1.0)
    reasons["reserved"] = explain(ns, chain(1)[0])
    pool.clock.advance(1.0)
    pool.directory.expire()
    reasons["abandoned"] = explain(ns, chain(1)[0])
    pool.store(chain(2, 3))
    reasons["stored"] = explain(ns, chain(2)[0])
    segment, slot = pool.slot_of(chain(2)[0])
    pool.directory.report_bad(segment.segment_id, ns, slot.hash, slot.slot, slot.generation)
    reasons["reported bad"] = explain(ns, chain(2)[0])
    reasons["below it"] = explain(ns, chain(2, 3)[1])
    pool.directory.lose_segment(pool.slot_of(chain(2, 3)[1])[0].segment_id)
    reasons["node lost"] = explain(ns, chain(2, 3)[1])

    assert reasons == {
        "never stored": MissReason.COLD,
        "reserved": MissReason.IN_FLIGHT,
        "abandoned": MissReason.EXPIRED,
        "stored": None,
        "reported bad": MissReason.VERIFY_FAILED,
        "below it": MissReason.PARENT_MISSING,
        "node lost": MissReason.NODE_DOWN,
    }


def test_an_evicted_block_says_so_even_after_a_refused_attempt_to_store_it_again():
    pool = SmallPool(1)
    pool.store(chain(1))
    pool.store(chain(2))
    assert pool.directory.explain(pool.namespace.id, chain(1)[0]) == MissReason.EVICTED

    pool.directory.pin(pool.namespace.id, chain(2)[0])
    assert list(pool.reserve(chain(1)).wants) == [Want.NO_ROOM]

    assert pool.directory.explain(pool.namespace.id, chain(1)[0]) == MissReason.EVICTED


def test_the_oldest_reasons_are_forgotten_first():
    pool = SmallPool(1, config=DirectoryConfig(tombstones=2))
    for token in range(4):
        pool.store(chain(token))

    reasons = [pool.directory.explain(pool.namespace.id, chain(token)[0]) for token in range(4)]

    assert reasons == [MissReason.COLD, MissReason.EVICTED, MissReason.EVICTED, None]


def test_stats_count_blocks_bytes_and_what_is_open(pool):
    pool.store(chain(1, 2))
    pool.reserve(chain(3))

    stats = pool.directory.stats()

    assert (stats.namespaces, stats.blocks, stats.reservations) == (1, 3, 1)
    assert (stats.used_bytes, stats.capacity_bytes) == (3 * PAGE_BYTES, 20 * PAGE_BYTES)
