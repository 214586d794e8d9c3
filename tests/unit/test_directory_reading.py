"""What the directory promises readers: how far a chain goes, where its blocks lie, and why it was a miss."""

import pytest
from fake_node import SHARDED, SmallPool, chain, make_namespace

from kvpool.core.directory import DirectoryConfig, MissReason, Want
from kvpool.core.limits import PAGE_BYTES

WANTED = Want.WANTED


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
    pool.lose(pool.slot_of(chain(2, 3)[1])[0].segment_id)
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
