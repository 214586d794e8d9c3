"""Copies between nodes over UCX: every byte arrives, what carried it is shown, and a source that dies harms nobody."""

import json
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest

import kvpool
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain
from tests.integration.test_replicas import HOT, held_blocks, kvpool_drain, make_hot, states
from tests.integration.test_ucx import Frozen, helper_of, used_bytes
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def tcp_underneath(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def pool(start_pool):
    """Two nodes that serve UCX, as if they were on two hosts: neither finds the other's shared memory."""
    pool = start_pool(nodes=0, **HOT)
    for name in ("n0", "n1"):
        start_node(pool, name)
    return pool


def start_node(pool: Pool, name: str) -> None:
    pool.start_node(name, "32MiB", ucx=True)
    (pool.directory / f"{name}.sock").unlink()


def fetched_bytes(client: kvpool.Client) -> dict[str, dict[str, int]]:
    return {node.node_id: node.fetched_bytes for node in client.status().nodes if node.state != "lost"}


def store_on_one(pool: Pool, keyspace: kvpool.Keyspace, chain: list[bytes], blocks: np.ndarray) -> tuple[str, str]:
    """Store the chain; the names of the node that has it, and of the other."""
    assert keyspace.store(chain, blocks).stored == len(chain)
    [first] = [name for name, count in held_blocks(keyspace._client).items() if count]
    return first, "n1" if first == "n0" else "n0"


def helpers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "kvpool.transport.ucx.helper" in child.cmdline()]


def test_a_copy_is_made_over_ucx_byte_for_byte(pool, rng):
    chain, blocks, loaded = random_chain(8), random_blocks(rng, 8), blank(8)
    client = pool.connect("tcp")
    keyspace = open_blocks(client)
    first, second = store_on_one(pool, keyspace, chain, blocks)

    make_hot(keyspace, chain, copies=2)

    eventually(lambda: fetched_bytes(client)[second])
    assert fetched_bytes(client) == {first: {}, second: {"ucx": blocks.nbytes}}
    pool.kill(pool.nodes[first])
    assert keyspace.load(chain, loaded).loaded == 8, "from the copy"
    np.testing.assert_array_equal(blocks, loaded)


def test_a_drain_goes_over_ucx_and_status_shows_it(pool, rng):
    chain, blocks, loaded = random_chain(40), random_blocks(rng, 40), blank(40)
    client = pool.connect("tcp")
    keyspace = open_blocks(client)
    first, second = store_on_one(pool, keyspace, chain, blocks)

    drained = kvpool_drain(pool, first)

    assert drained.returncode == 0, drained.stderr
    assert json.loads(drained.stdout)["left_blocks"] == 0
    eventually(lambda: fetched_bytes(client) == {second: {"ucx": blocks.nbytes}})
    assert keyspace.load(chain, loaded).loaded == 40
    np.testing.assert_array_equal(blocks, loaded)
    shown = subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", "status", f"--pool={pool.uri}", "--transports=tcp"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        check=True,
    )
    assert "2.5 MiB over ucx" in shown.stdout


def test_a_source_killed_in_mid_copy_leaves_nothing_half_copied(pool, rng):
    chain, blocks, loaded = random_chain(40), random_blocks(rng, 40), blank(40)
    client = pool.connect("tcp")
    keyspace = open_blocks(client)
    first, second = store_on_one(pool, keyspace, chain, blocks)

    with Frozen(helper_of(pool.nodes[first].pid)):
        client.drain(first)
        eventually(lambda: len(helpers_of(pool.nodes[second].pid)) == 2)  # one to fetch with
        eventually(lambda: used_bytes(pool, second) == blocks.nbytes)  # its slots are open, and nothing comes
        pool.kill(pool.nodes[first])

    eventually(lambda: used_bytes(pool, second) == 0)
    assert fetched_bytes(client)[second] == {}
    assert keyspace.load(chain, loaded).loaded == 0
    start_node(pool, first)
    eventually(lambda: states(client) == {first: "ready", second: "ready"})
    assert keyspace.match(chain).blocks == 40
    assert kvpool_drain(pool, first).returncode == 0
    assert keyspace.load(chain, loaded).loaded == 40
    np.testing.assert_array_equal(blocks, loaded)
    eventually(lambda: fetched_bytes(client)[second] == {"ucx": blocks.nbytes})
