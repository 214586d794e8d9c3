"""Copies between real nodes: hot prefixes get further ones, readers turn to them, and a node can be drained."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import kvpool
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually

HOT = {"replica-read-rate": 0.5, "heartbeat": "100ms", "node-ttl": "5s"}
"""A few reads make a block hot."""


@pytest.fixture
def hot_pool(start_pool):
    """Two nodes, and a service that copies at the first sign of demand."""
    pool = start_pool(nodes=0)
    pool.stop(pool.meta)
    pool.start_meta(**HOT)
    for i in range(2):
        pool.start_node(f"n{i}")
    return pool


def held_blocks(client: kvpool.Client) -> dict[str, int]:
    return {node.node_id: node.blocks for node in client.status().nodes if node.state != "lost"}


def states(client: kvpool.Client) -> dict[str, str]:
    try:
        return {node.node_id: node.state for node in client.status().nodes}
    except kvpool.UnavailableError:
        return {}


def make_hot(keyspace: kvpool.Keyspace, chain: list[bytes], copies: int) -> None:
    """Read the chain until another node has a copy of all of it."""
    loaded = blank(len(chain))

    def is_copied() -> bool:
        for _ in range(20):
            assert keyspace.load(chain, loaded).loaded == len(chain)
        return sum(held_blocks(keyspace._client).values()) == copies * len(chain)

    eventually(is_copied)


def kvpool_drain(pool: Pool, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvpool.cli.main", "drain", *arguments, "--pool", pool.uri, "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_hot_prefix_survives_the_node_that_held_it(hot_pool, rng, transport):
    chain, blocks, loaded = random_chain(8), random_blocks(rng, 8), blank(8)
    client = hot_pool.connect(transport)
    keyspace = open_blocks(client)
    keyspace.store(chain, blocks)
    [first] = [name for name, count in held_blocks(client).items() if count]

    make_hot(keyspace, chain, copies=2)
    hot_pool.kill(hot_pool.nodes[first])

    assert keyspace.load(chain, loaded).loaded == 8, "within the call, from the other node"
    np.testing.assert_array_equal(blocks, loaded)
    eventually(lambda: first not in held_blocks(client))
    assert keyspace.match(chain).blocks == 8
    assert client.stats().misses == {}


def test_a_drained_node_takes_nothing_with_it(start_pool, rng):
    pool = start_pool(nodes=3)
    client = pool.connect("tcp")
    keyspace = open_blocks(client)
    chains = [(random_chain(20), random_blocks(rng, 20)) for _ in range(15)]
    for chain, blocks in chains:
        assert keyspace.store(chain, blocks).stored == 20
    assert all(held_blocks(client).values())
    before = held_blocks(client)["n1"]

    drained = kvpool_drain(pool, "n1")

    assert drained.returncode == 0, drained.stderr
    status = json.loads(drained.stdout)
    assert (status["state"], status["blocks"], status["left_blocks"], status["reason"]) == ("left", before, 0, "")
    assert pool.nodes["n1"].wait() == 0
    assert set(held_blocks(client)) == {"n0", "n2"}, "a node that left is not a lost one"
    for chain, blocks in chains:
        loaded = blank(20)
        assert keyspace.match(chain).blocks == 20
        assert keyspace.load(chain, loaded).loaded == 20
        np.testing.assert_array_equal(blocks, loaded)


def test_a_drain_keeps_what_was_used_last_where_room_is_short(start_pool, rng):
    pool = start_pool(nodes=0)
    pool.start_node("old", "4MiB")
    client = pool.connect()
    keyspace = open_blocks(client)
    cold, warm = [(random_chain(24), random_blocks(rng, 24)) for _ in range(2)]
    for chain, blocks in (cold, warm):
        assert keyspace.store(chain, blocks).stored == 24
    pool.start_node("new", "2MiB")
    assert keyspace.match(warm[0]).blocks == 24

    drained = kvpool_drain(pool, "old", "--stay")

    status = json.loads(drained.stdout)
    assert (status["state"], status["left_blocks"], status["reason"]) == ("drained", 16, "no_room")
    assert keyspace.match(cold[0]).blocks == 24, "it stays, and serves what it has"
    pool.stop(pool.nodes["old"])
    eventually(lambda: keyspace.match(cold[0]).blocks == 8)
    assert keyspace.match(warm[0]).blocks == 24


def test_a_drain_can_be_cancelled_and_taken_up_again(start_pool, rng):
    pool = start_pool(nodes=2)
    client = pool.connect()
    keyspace = open_blocks(client)
    keyspace.store(random_chain(16), random_blocks(rng, 16))

    assert kvpool_drain(pool, "n0", "--stay").returncode == 0
    assert states(client) == {"n0": "draining", "n1": "ready"}
    cancelled = kvpool_drain(pool, "n0", "--cancel")

    assert json.loads(cancelled.stdout)["state"] == "cancelled"
    assert states(client) == {"n0": "ready", "n1": "ready"}
    assert kvpool_drain(pool, "n0", "--cancel").returncode == 2, "there is nothing to cancel"
    while not held_blocks(client)["n0"]:
        keyspace.store(random_chain(16), random_blocks(rng, 16))
    assert kvpool_drain(pool, "n0").returncode == 0
    assert pool.nodes["n0"].wait() == 0


def test_draining_a_node_that_is_not_there_names_those_that_are(start_pool):
    pool = start_pool(nodes=1)

    refused = kvpool_drain(pool, "n7")
    impossible = kvpool_drain(pool, "n0", "--timeout", "48h")

    assert (refused.returncode, impossible.returncode) == (2, 2)
    assert "no node 'n7' is ready; the pool has n0" in refused.stderr
    assert "it must be above 0 and at most 86400" in impossible.stderr
    assert states(pool.connect()) == {"n0": "ready"}


def test_a_node_that_dies_while_it_drains_is_reported(start_pool, rng):
    pool = start_pool(nodes=1)
    keyspace = open_blocks(pool.connect())
    keyspace.store(random_chain(4), random_blocks(rng, 4))
    pool.start_node("n1")
    pool.signal(pool.nodes["n1"], signal.SIGSTOP)  # so that nothing can be copied
    client = pool.connect()
    assert client.drain("n0").state == "copying"

    pool.kill(pool.nodes["n0"])

    eventually(lambda: client.drain_status("n0").state == "lost")
    pool.signal(pool.nodes["n1"], signal.SIGCONT)


def test_a_frozen_node_leaves_a_load_time_for_the_other_copy(hot_pool, rng):
    chain, blocks, loaded = random_chain(8), random_blocks(rng, 8), blank(8)
    client = hot_pool.connect("tcp")
    keyspace = open_blocks(client)
    keyspace.store(chain, blocks)
    make_hot(keyspace, chain, copies=2)

    for name in ("n0", "n1"):
        hot_pool.signal(hot_pool.nodes[name], signal.SIGSTOP)
        try:
            results = [keyspace.load(chain, loaded, timeout_s=2.0).loaded for _ in range(2)]
        finally:
            hot_pool.signal(hot_pool.nodes[name], signal.SIGCONT)
        assert results == [8, 8]
        np.testing.assert_array_equal(blocks, loaded)
    assert client.stats().misses == {}


def test_a_copy_on_this_host_is_read_before_one_behind_a_network(hot_pool, rng):
    chain, blocks, loaded = random_chain(8), random_blocks(rng, 8), blank(8)
    writer = open_blocks(hot_pool.connect("tcp"), model="shared")
    writer.store(chain, blocks)
    [first] = [name for name, count in held_blocks(writer._client).items() if count]
    make_hot(writer, chain, copies=2)
    (hot_pool.directory / f"{first}.sock").unlink()  # as if it were on another host

    client = kvpool.connect(hot_pool.uri, transports=["shm", "tcp"])
    with client:
        keyspace = open_blocks(client, model="shared")
        for _ in range(20):
            assert keyspace.load(chain, loaded).loaded == 8
        assert client.stats().loaded_bytes == {"shm": 20 * blocks.nbytes}
    np.testing.assert_array_equal(blocks, loaded)


def test_copies_go_first_when_the_pool_fills(hot_pool, rng):
    chain, blocks = random_chain(8), random_blocks(rng, 8)
    client = hot_pool.connect()
    keyspace = open_blocks(client)
    keyspace.store(chain, blocks)
    make_hot(keyspace, chain, copies=2)
    room = 2 * (32 << 20) // (64 << 10) - 8

    others = random_chain(room)
    for first in range(0, room, 64):
        assert keyspace.store(others[: first + 64], random_blocks(rng, min(64, room - first)), first=first).refused == 0

    counters = client.status().counters
    assert (counters["reclaimed_copies"], counters["evicted_blocks"], counters["surplus_blocks"]) == (8, 0, 0)
    assert keyspace.match(chain).blocks == 8
    assert keyspace.match(others).blocks == room


def test_a_node_goes_on_draining_when_the_metadata_service_restarts(start_pool, rng):
    pool = start_pool(nodes=2)
    client = pool.connect()
    keyspace = open_blocks(client)
    keyspace.store(random_chain(8), random_blocks(rng, 8))
    assert kvpool_drain(pool, "n0", "--stay").returncode == 0

    pool.kill(pool.meta)
    pool.start_meta()

    eventually(lambda: states(client) == {"n0": "draining", "n1": "ready"})
    assert kvpool_drain(pool, "n0").returncode == 0, "and can be drained to the end"
    assert pool.nodes["n0"].wait() == 0
