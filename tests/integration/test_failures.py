"""Parts that die, freeze or restart: readers get misses by their deadline, and what survived is served again."""

import os
import signal

import numpy as np
import pytest

import kvpool
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_killed_node_turns_into_misses(start_pool, rng, transport):
    pool = start_pool(nodes=1)
    chain, blocks = random_chain(4), random_blocks(rng, 4)
    keyspace = open_blocks(pool.connect(transport))
    keyspace.store(chain, list(blocks))

    pool.kill(pool.nodes["n0"])
    eventually(lambda: keyspace.match(chain).blocks == 0)

    assert keyspace.match(chain).reason == kvpool.MissReason.NODE_DOWN
    assert keyspace.load(chain, list(blank(4))).loaded == 0
    refused = keyspace.store(random_chain(2), list(random_blocks(rng, 2)))
    assert (refused.stored, refused.refused) == (0, 2)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("end", [Pool.kill, Pool.stop], ids=["killed", "stopped"])
def test_blocks_survive_a_restart_of_their_node(start_pool, rng, transport, end):
    pool = start_pool(nodes=1)
    chain, blocks, loaded = random_chain(16), random_blocks(rng, 16), blank(16)
    keyspace = open_blocks(pool.connect(transport))
    keyspace.store(chain, list(blocks))

    end(pool, pool.nodes["n0"])
    pool.start_node("n0")

    eventually(lambda: keyspace.match(chain).blocks == 16)
    assert keyspace.load(chain, list(loaded)).loaded == 16
    np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_client_that_only_writes_follows_nodes_that_restart_and_join(start_pool, rng, transport):
    pool = start_pool(nodes=1)
    reserves = open_blocks(pool.connect(transport), model="followed")
    writes = open_blocks(pool.connect(transport), model="followed")

    def written() -> int:
        chain = random_chain(2)
        reservation = reserves.reserve(chain)
        committed = len(writes.write(reservation, list(random_blocks(rng, 2))).committed)
        reserves.abort(reservation)
        return committed

    assert written() == 2
    pool.kill(pool.nodes["n0"])
    pool.start_node("n0")
    assert written() == 2
    pool.start_node("n1")
    pool.kill(pool.nodes["n0"])
    eventually(lambda: written() == 2)


def test_the_pool_is_rebuilt_from_its_nodes_when_the_metadata_service_restarts(start_pool, rng):
    pool = start_pool(nodes=2)
    chain, blocks, loaded = random_chain(16), random_blocks(rng, 16), blank(16)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain, list(blocks))

    pool.kill(pool.meta)
    assert keyspace.match(chain) == kvpool.Match(0, kvpool.MissReason.NODE_DOWN, asked=False)
    pool.start_meta()

    eventually(lambda: keyspace.match(chain).blocks == 16)
    assert keyspace.load(chain, list(loaded)).loaded == 16
    np.testing.assert_array_equal(blocks, loaded)
    eventually(lambda: keyspace.store(random_chain(1), list(random_blocks(rng, 1))).stored == 1)


def test_a_frozen_metadata_service_is_a_miss_over_the_deadline(start_pool, rng):
    pool = start_pool(nodes=1)
    chain = random_chain(2)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain, list(random_blocks(rng, 2)))

    pool.signal(pool.meta, signal.SIGSTOP)
    try:
        frozen = keyspace.match(chain, timeout_s=0.2)
    finally:
        pool.signal(pool.meta, signal.SIGCONT)

    assert frozen == kvpool.Match(0, kvpool.MissReason.OVER_DEADLINE, asked=False)
    eventually(lambda: keyspace.match(chain).blocks == 2)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_frozen_node_is_a_miss_by_the_deadline(start_pool, rng, transport):
    pool = start_pool(nodes=1)
    chain, blocks, loaded = random_chain(2), random_blocks(rng, 2), blank(2)
    keyspace = open_blocks(pool.connect(transport))
    keyspace.store(chain, list(blocks))

    pool.signal(pool.nodes["n0"], signal.SIGSTOP)
    try:
        frozen = keyspace.load(chain, list(loaded), timeout_s=0.2)
    finally:
        pool.signal(pool.nodes["n0"], signal.SIGCONT)

    assert frozen.loaded == 0
    assert set(frozen.reasons) == {kvpool.MissReason.OVER_DEADLINE}


def test_a_frozen_node_still_serves_its_memory_over_shm(start_pool, rng):
    pool = start_pool(nodes=1)
    chain, blocks, loaded = random_chain(2), random_blocks(rng, 2), blank(2)
    keyspace = open_blocks(pool.connect("shm"))
    keyspace.store(chain, list(blocks))
    keyspace.load(chain, list(blank(2)))

    pool.signal(pool.nodes["n0"], signal.SIGSTOP)
    try:
        assert keyspace.load(chain, list(loaded)).loaded == 2
    finally:
        pool.signal(pool.nodes["n0"], signal.SIGCONT)
    np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_flipped_bit_is_a_miss_and_the_block_can_be_stored_again(start_pool, rng, transport):
    pool = start_pool(nodes=1)
    chain, blocks, loaded = random_chain(1), random_blocks(rng, 1), blank(1)
    client = pool.connect(transport)
    keyspace = open_blocks(client)
    keyspace.store(chain, list(blocks))
    payload = pool.directory / "kvpool-n0.payload"
    where = payload.read_bytes().index(blocks[0].tobytes())

    with payload.open("r+b") as file:
        file.seek(where + 12_345)
        file.write(bytes([blocks[0][12_345] ^ 1]))
    result = keyspace.load(chain, list(loaded))

    assert (result.loaded, result.reasons) == (0, (kvpool.MissReason.VERIFY_FAILED,))
    assert client.stats().verify_failures == 1
    assert keyspace.match(chain) == kvpool.Match(0, kvpool.MissReason.VERIFY_FAILED)
    assert keyspace.store(chain, list(blocks)).stored == 1
    assert keyspace.load(chain, list(loaded)).loaded == 1
    np.testing.assert_array_equal(blocks, loaded)


def test_a_writer_that_dies_between_prepare_and_commit_gives_its_slots_back(start_pool, rng):
    pool = start_pool(nodes=1, size="1MiB")
    chain = random_chain(16)
    child = os.fork()
    if child == 0:
        try:
            client = kvpool.connect(pool.uri, transports=["shm"])
            keyspace = open_blocks(client, model="dying")
            from kvpool.transport import shm

            # The last step before the commit: everything is written, nothing is sealed.
            shm.CommitSlotsRequest = lambda *_: os._exit(0)
            keyspace.store(chain, list(random_blocks(np.random.default_rng(1), 16)))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0

    keyspace = open_blocks(pool.connect(), model="dying")

    eventually(lambda: keyspace.match(chain).reason != kvpool.MissReason.IN_FLIGHT)
    assert keyspace.store(random_chain(16), list(random_blocks(rng, 16))).stored == 16


def test_connecting_to_nobody_names_the_address_and_the_fix():
    with pytest.raises(kvpool.UnavailableError, match=r"grpc://127.0.0.1:1 cannot be reached.*kvpool meta"):
        kvpool.connect("grpc://127.0.0.1:1", timeout_s=2)


def test_connecting_to_a_server_that_never_answers_ends_by_the_deadline(silent_server):
    with pytest.raises(kvpool.UnavailableError):
        kvpool.connect(f"grpc://{silent_server}", timeout_s=0.5)
