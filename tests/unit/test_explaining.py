"""What the directory knows of a block that cannot be matched: the cause, the node, the pressure, the ancestor."""

import pytest
from fake_node import SHARDED, SmallPool, chain

from kvpool.core.directory import Cause, DirectoryConfig, Explanation, Memory, MissReason


def explained(pool, block_hash, namespace=None):
    return pool.directory.explain_block((namespace or pool.namespace).id, block_hash)


def test_an_evicted_block_had_been_unused_for_a_while_in_a_full_pool():
    pool = SmallPool(2)
    pool.store(chain(1))
    pool.clock.advance(5.0)
    pool.store(chain(2))
    pool.clock.advance(2.0)
    pool.store(chain(3))
    pool.clock.advance(1.0)

    why = explained(pool, chain(1)[0])

    assert (why.reason, why.cause, why.nodes) == (MissReason.EVICTED, Cause.ROOM, ("node-0",))
    assert (why.ago_s, why.idle_s) == (pytest.approx(1.0), pytest.approx(7.0))
    assert why.fill == pytest.approx(0.5), "as it left"


def test_what_made_room_for_an_extent_is_said_to_be_that():
    pool = SmallPool(4)
    pool.store(chain(1))
    reserved = pool.reserve(chain(2))
    pool.directory.abort(reserved.reservation, chain(2), crowded=True)

    assert explained(pool, chain(1)[0]).cause == Cause.SCATTERED
    assert explained(pool, chain(2)[0]).cause == Cause.ABORTED


def test_a_writer_that_was_too_slow(pool):
    pool.reserve(chain(1), owner="slow", ttl_s=30.0)
    pool.clock.advance(10.0)

    writing = explained(pool, chain(1)[0])
    assert (writing.reason, writing.owner, writing.nodes) == (MissReason.IN_FLIGHT, "slow", ("node-0",))
    assert writing.deadline_s == pytest.approx(20.0)

    pool.clock.advance(20.0)
    pool.directory.expire()
    late = explained(pool, chain(1)[0])
    assert (late.reason, late.cause) == (MissReason.EXPIRED, Cause.DEADLINE)


@pytest.mark.parametrize(
    ("bad", "reason", "cause"),
    [(False, MissReason.EXPIRED, Cause.GONE), (True, MissReason.VERIFY_FAILED, Cause.SCRUB)],
)
def test_what_its_node_reported(pool, bad, reason, cause):
    pool.store(chain(1))
    segment, slot = pool.slot_of(chain(1)[0])
    where = (segment.segment_id, pool.namespace.id, slot.hash, slot.slot, slot.generation)

    assert pool.directory.gone(*where, bad=bad)

    why = explained(pool, chain(1)[0])
    assert (why.reason, why.cause, why.nodes) == (reason, cause, (segment.node_id,))
    assert pool.directory.stats().bad_blocks == bad
    assert not pool.directory.gone(*where, bad=bad)
    assert pool.directory.stats().bad_blocks == bad


def test_the_nearest_missing_ancestor_is_named(pool):
    hashes = chain(1, 2, 3, 4)
    pool.store(hashes)
    pool.lose_block(hashes[1])

    why = explained(pool, hashes[3])

    assert (why.reason, why.missing, why.missing_reason) == (MissReason.PARENT_MISSING, hashes[1], MissReason.EXPIRED)
    assert explained(pool, hashes[0]).reason is None


def test_an_ancestor_without_one_of_its_shards_is_the_missing_one():
    pool = SmallPool(10, 10, namespaces=(SHARDED,))
    hashes = chain(1, 2, 3)
    pool.store(hashes)
    pool.lose_block(hashes[0], shard=1)

    assert explained(pool, hashes[0]).cause == Cause.GONE
    assert explained(pool, hashes[2]).missing == hashes[0]


def test_blocks_never_seen_and_blocks_forgotten_look_the_same_and_the_memory_says_so():
    pool = SmallPool(1, config=DirectoryConfig(tombstones=2))
    assert pool.directory.memory() == Memory(full=False, since_s=None)
    for token in range(4):
        pool.store(chain(token))
        pool.clock.advance(1.0)

    assert explained(pool, chain(9)[0]) == explained(pool, chain(0)[0]) == Explanation(MissReason.COLD)
    memory = pool.directory.memory()
    assert (memory.full, memory.since_s) == (True, pytest.approx(2.0))
