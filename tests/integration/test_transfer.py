"""Bytes through real processes over every transport: what comes out is what went in."""

from itertools import pairwise

import numpy as np
import pytest

import kvpool
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain

TRANSPORTS = ["shm", "unix", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_client_loads_what_one_stored(pool, rng, transport):
    chain, blocks, loaded = random_chain(20), random_blocks(rng, 20), blank(20)
    writer = open_blocks(pool.connect(transport), model=f"shared-{transport}")
    reader = open_blocks(pool.connect(transport), model=f"shared-{transport}")

    stored = writer.store(chain, list(blocks))
    matched = reader.match(chain)
    result = reader.load(chain, list(loaded))

    assert stored == kvpool.StoreResult(stored=20, size_bytes=20 * BLOCK_BYTES)
    assert matched == kvpool.Match(20, None)
    assert (result.loaded, result.size_bytes) == (20, 20 * BLOCK_BYTES)
    np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_stored_over_one_transport_load_over_any_other(pool, rng, transport):
    chain, blocks = random_chain(8), random_blocks(rng, 8)
    open_blocks(pool.connect(transport), model=f"from-{transport}").store(chain, list(blocks))

    for other in TRANSPORTS:
        loaded = blank(8)
        result = open_blocks(pool.connect(other), model=f"from-{transport}").load(chain, list(loaded))
        assert result.loaded == 8
        np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block_bytes", [1, 4095, 4097, 300_000, 3 << 20])
def test_blocks_of_any_length_keep_every_byte(pool, rng, transport, block_bytes):
    blocks, loaded = random_blocks(rng, 3, block_bytes), blank(3, block_bytes)
    chain = random_chain(3)
    keyspace = open_blocks(pool.connect(transport), block_bytes)

    assert keyspace.store(chain, list(blocks)).stored == 3
    assert keyspace.load(chain, list(loaded)).loaded == 3
    np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pieces_of_unequal_length_are_gathered_and_scattered(pool, rng, transport):
    blocks, loaded = random_blocks(rng, 4), blank(4)
    chain = random_chain(4)
    keyspace = open_blocks(pool.connect(transport))
    cuts, other_cuts = (0, 10, 5000, BLOCK_BYTES), (0, 33_000, 33_001, BLOCK_BYTES)

    def pieces(block, at):
        return [block[a:b] for a, b in pairwise(at)]

    keyspace.store(chain, [pieces(block, cuts) for block in blocks])
    result = keyspace.load(chain, [pieces(block, other_cuts) for block in loaded])

    assert result.loaded == 4
    np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slice_of_the_chain_loads_alone(pool, rng, transport):
    chain, blocks, loaded = random_chain(10), random_blocks(rng, 10), blank(3)
    keyspace = open_blocks(pool.connect(transport))
    keyspace.store(chain, list(blocks))

    result = keyspace.load(chain[:8], list(loaded), first=5)

    assert result.loaded == 3
    np.testing.assert_array_equal(blocks[5:8], loaded)


def test_a_load_beyond_what_is_stored_is_a_partial_load(pool, rng):
    chain, blocks, loaded = random_chain(6), random_blocks(rng, 4), blank(6)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain[:4], list(blocks))

    result = keyspace.load(chain, list(loaded))

    assert result.loaded == 4
    assert result.reasons == (None,) * 4 + (kvpool.MissReason.COLD,) * 2
    np.testing.assert_array_equal(blocks, loaded[:4])
    assert not loaded[4:].any(), "a miss writes nothing"


def test_the_first_writer_wins_and_the_second_is_told(pool, rng):
    chain, first, second, loaded = random_chain(3), random_blocks(rng, 3), random_blocks(rng, 3), blank(3)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain, list(first))

    again = keyspace.store(chain, list(second))
    keyspace.load(chain, list(loaded))

    assert (again.stored, again.existing) == (0, 3)
    np.testing.assert_array_equal(first, loaded)


def test_a_missing_ancestor_is_named(pool, rng):
    chain, blocks = random_chain(5), random_blocks(rng, 2)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain[:1], list(random_blocks(rng, 1)))

    result = keyspace.store(chain, list(blocks), first=3)

    assert (result.stored, result.missing_from, result.refused) == (0, 1, 2)
    assert keyspace.match(chain).blocks == 1


def test_a_block_of_two_shards_is_there_when_both_ranks_wrote(pool, rng):
    chain, ranks, loaded = random_chain(4), [random_blocks(rng, 4), random_blocks(rng, 4)], blank(4)
    scheduler = open_blocks(pool.connect(), shards=2, model="tp2")
    workers = [open_blocks(pool.connect(t), shards=2, model="tp2") for t in ("shm", "tcp")]
    reservation = scheduler.reserve(chain)

    workers[0].write(reservation, list(ranks[0]), shard=0)
    half = scheduler.match(chain)
    written = workers[1].write(reservation, list(ranks[1]), shard=1)

    assert half == kvpool.Match(0, kvpool.MissReason.IN_FLIGHT)
    assert written.committed == (0, 1, 2, 3)
    assert scheduler.match(chain).blocks == 4
    for shard in (0, 1):
        assert workers[shard].load(chain, list(loaded), shard=shard).loaded == 4
        np.testing.assert_array_equal(ranks[shard], loaded)


def test_an_aborted_reservation_frees_its_blocks_for_others(pool, rng):
    chain, blocks = random_chain(3), random_blocks(rng, 3)
    keyspace = open_blocks(pool.connect())
    reservation = keyspace.reserve(chain)
    assert keyspace.store(chain, list(blocks)).in_flight == 3

    keyspace.abort(reservation)

    assert keyspace.store(chain, list(blocks)).stored == 3


def test_two_namespaces_share_nothing(pool, rng):
    chain, blocks = random_chain(3), random_blocks(rng, 3)
    client = pool.connect()
    open_blocks(client, model="a").store(chain, list(blocks))

    other = open_blocks(client, model="b")

    assert other.match(chain) == kvpool.Match(0, kvpool.MissReason.COLD)
    assert other.load(chain, list(blank(3))).loaded == 0


def test_the_transport_in_use_is_visible(start_pool, rng):
    pool = start_pool()
    for transport in TRANSPORTS:
        client = pool.connect(transport)
        open_blocks(client).store(random_chain(1), list(random_blocks(rng, 1)))

        assert [node.transport for node in client.status().nodes] == [transport]
        assert client.stats().stored_bytes == {transport: BLOCK_BYTES}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_working_set_of_three_times_the_pool_is_stored_and_served_without_a_wrong_byte(start_pool, rng, transport):
    pool = start_pool(nodes=2, size="2MiB")
    keyspace = open_blocks(pool.connect(transport))
    chains = [random_chain(8) for _ in range(24)]
    contents = [random_blocks(rng, 8) for _ in chains]

    for chain, blocks in zip(chains, contents, strict=True):
        assert keyspace.store(chain, list(blocks)).stored == 8, "a put never fails for want of room"

    held = 0
    for chain, blocks in zip(chains, contents, strict=True):
        loaded = blank(8)
        result = keyspace.load(chain, list(loaded))
        np.testing.assert_array_equal(blocks[: result.loaded], loaded[: result.loaded])
        held += result.loaded
    assert held == 64, "the pool is full, and all of it is reachable"


def test_mixed_block_sizes_stay_writable_in_a_full_pool(start_pool, rng):
    pool = start_pool(size="16MiB")
    client = pool.connect()
    spaces = {size: open_blocks(client, size) for size in (4 << 10, 256 << 10, 3 << 20)}
    order = rng.choice(list(spaces), 120, p=[0.4, 0.4, 0.2])

    stored = [spaces[size].store(random_chain(1), list(random_blocks(rng, 1, size))).stored for size in order]

    assert sum(stored) >= 0.9 * len(stored), "fragmentation refuses few blocks"
    assert client.status().nodes[0].used_bytes <= 16 << 20


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block_bytes", [4096, BLOCK_BYTES, 5000, 1 << 20])
def test_blocks_side_by_side_in_one_array_keep_every_byte(pool, rng, transport, block_bytes):
    blocks, loaded = random_blocks(rng, 40, block_bytes), blank(40, block_bytes)
    chain = random_chain(40)
    keyspace = open_blocks(pool.connect(transport), block_bytes)

    assert keyspace.store(chain[:30], blocks[:30]).stored == 30
    assert keyspace.store(chain, blocks[30:], first=30).stored == 10
    assert keyspace.load(chain, loaded).loaded == 40
    np.testing.assert_array_equal(blocks, loaded)


def test_a_store_longer_than_one_step_is_reserved_while_it_is_written(pool, rng):
    chain, blocks, loaded = random_chain(1000), random_blocks(rng, 1000, 4096), blank(1000, 4096)
    keyspace = open_blocks(pool.connect(), 4096)

    stored = keyspace.store(chain, blocks)

    assert stored == kvpool.StoreResult(stored=1000, size_bytes=1000 * 4096)
    assert keyspace.load(chain, loaded).loaded == 1000
    np.testing.assert_array_equal(blocks, loaded)


def test_a_released_lease_holds_nothing(start_pool, rng):
    pool = start_pool(size="1MiB")
    keyspace = open_blocks(pool.connect())
    chain = random_chain(8)
    keyspace.store(chain, random_blocks(rng, 8))
    matched = keyspace.match(chain, lease_s=60)

    keyspace.release(matched)
    keyspace.release(matched)
    stored = keyspace.store(random_chain(16), random_blocks(rng, 16))

    assert matched.lease
    assert stored.stored == 16
    assert keyspace.match(chain).reason == kvpool.MissReason.EVICTED
