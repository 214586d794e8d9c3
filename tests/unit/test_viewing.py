"""What people look at in a directory: blocks, namespaces, hot heads, the latest misses."""

import math

import pytest
from fake_node import SHARDED, SmallPool, chain, make_namespace

from kvpool.core.directory import BlockState, MissReason
from kvpool.core.directory.heat import SAMPLE_EVERY, Heat
from kvpool.core.directory.state import LATEST_MISSES_MAX
from kvpool.core.directory.viewing import CHILDREN_MAX
from kvpool.core.errors import UnknownNamespaceError
from kvpool.core.limits import PAGE_BYTES

SECOND_US = 1_000_000


def seen(pool, block_hash, namespace=None):
    return pool.directory.view.block((namespace or pool.namespace).id, block_hash)


def test_a_block_with_its_copy_parent_and_children(pool):
    pool.store(chain(1, 2))
    pool.store(chain(1, 3))
    pool.clock.advance(2.0)

    head, leaf = seen(pool, chain(1)[0]), seen(pool, chain(1, 2)[1])

    assert (head.state, head.parent, head.children, leaf.children) == (BlockState.VISIBLE, b"", 2, 0)
    assert leaf.parent == chain(1)[0]
    assert leaf.idle_s == pytest.approx(2.0)
    [copy] = leaf.copies
    assert (copy.medium, copy.shard, copy.surplus, head.slot_bytes) == ("shm", 0, False, PAGE_BYTES)
    held = pool.segments[copy.segment].held[copy.slot]
    assert (held.hash, held.generation, held.checksum) == (chain(1, 2)[1], copy.generation, copy.checksum)


def test_a_block_being_written_has_no_slot(pool):
    pool.reserve(chain(1))

    block = seen(pool, chain(1)[0])

    assert block.state == BlockState.IN_FLIGHT
    assert [copy.slot for copy in block.copies] == [None]


def test_each_shard_is_a_copy_of_its_own():
    pool = SmallPool(10, 10, namespaces=(SHARDED,))
    pool.store(chain(1))

    assert sorted(copy.shard for copy in seen(pool, chain(1)[0]).copies) == [0, 1]


def test_leases_and_pins_say_how_long_they_hold(pool):
    pool.store(chain(1))
    [block_hash] = chain(1)
    pool.directory.match(pool.namespace.id, block_hash, lease_s=5.0)
    pool.directory.match(pool.namespace.id, block_hash, lease_s=1.0)
    pool.clock.advance(1.0)

    block = seen(pool, block_hash)
    assert (block.leases, block.leased_s, block.pinned_s) == (2, pytest.approx(4.25), 0.0)

    pool.directory.pin(pool.namespace.id, block_hash, 3.0)
    assert seen(pool, block_hash).pinned_s == pytest.approx(3.0)
    pool.directory.pin(pool.namespace.id, block_hash)
    assert seen(pool, block_hash).pinned_s == math.inf


def test_children_are_counted_up_to_a_limit():
    pool = SmallPool(2 * CHILDREN_MAX)
    for token in range(CHILDREN_MAX + 5):
        pool.store(chain(0, token))

    assert seen(pool, chain(0)[0]).children == CHILDREN_MAX


def test_no_entry_is_none_and_no_namespace_an_error(pool):
    assert seen(pool, chain(9)[0]) is None
    with pytest.raises(UnknownNamespaceError):
        seen(pool, chain(9)[0], make_namespace(model="unheard-of"))


def test_usage_is_told_by_namespace():
    other = make_namespace(2, model="other")
    pool = SmallPool(20, namespaces=(SHARDED, other))
    pool.store(chain(1, 2))
    packed = b"".join(chain(1, 2, 3))
    pool.directory.match(SHARDED.id, packed)
    pool.directory.locate(SHARDED.id, packed)
    pool.directory.locate(SHARDED.id, packed, 1, 0)

    first, second = pool.directory.view.usage()

    assert (first.blocks, first.size_bytes, first.asked_blocks, first.matched_blocks) == (2, 4 * PAGE_BYTES, 3, 2)
    assert first.stored_bytes == 4 * PAGE_BYTES, "two shards of two blocks"
    assert first.read_bytes == 5 * PAGE_BYTES, "all shards of two, and one of one"
    assert (second.namespace, second.blocks, second.asked_blocks) == (other, 0, 0)


def test_the_latest_misses_come_first_and_are_bounded(pool):
    pool.store(chain(1, 2))
    for token in range(LATEST_MISSES_MAX + 3):
        pool.directory.match(pool.namespace.id, b"".join(chain(1, 2, 100 + token)))
        pool.clock.advance(1.0)
    pool.directory.match(pool.namespace.id, b"".join(chain(1, 2)))

    misses = pool.directory.view.misses()

    assert len(misses) == LATEST_MISSES_MAX
    assert misses[0].missing == chain(1, 2, 100 + LATEST_MISSES_MAX + 2)[2]
    assert (misses[0].reason, misses[0].matched, misses[0].asked) == (MissReason.COLD, 2, 3)
    assert misses[0].ago_s == pytest.approx(1.0)


def test_a_hot_head_says_how_it_branches_and_where_it_lives(pool):
    for token in range(3):
        pool.store(chain(1, 2, 10 + token))
    for token in range(40 * SAMPLE_EVERY):
        pool.directory.locate(pool.namespace.id, b"".join(chain(1, 2, 10 + token % 3)))

    heads = [pool.directory.view.head(head) for head in pool.directory.demand().heads(5)]

    shared = heads[0]
    assert (shared.first, shared.last, shared.blocks) == (chain(1)[0], chain(1, 2)[1], 2)
    assert (shared.branches, shared.namespace) == (3, pool.namespace)
    assert all(0 < share <= 1 for share in shared.nodes.values())
    assert sum(shared.nodes.values()) >= 1
    assert all(shared.reads_per_s >= other.reads_per_s for other in heads[1:])


def test_a_head_that_is_gone_is_none():
    pool = SmallPool(1)
    pool.store(chain(1))
    for _ in range(20 * SAMPLE_EVERY):
        pool.directory.locate(pool.namespace.id, chain(1)[0])
    [head] = pool.directory.demand().heads(5)
    pool.directory.lose_segment(pool.segments[0].segment_id)
    pool.directory.drop_lost()

    assert pool.directory.view.head(head) is None


def test_heads_are_the_most_read_and_no_more_than_asked_for():
    heat = Heat()
    for run, times in (([1, 2], 400), ([3], 200), ([4], 100)):
        for _ in range(times):
            heat.note(run, 0)

    heads = heat.demand(SECOND_US).heads(2)

    assert [head.rows for head in heads] == [(1, 2), (3,)]
    assert heat.demand(20 * SECOND_US).heads(2) == []
