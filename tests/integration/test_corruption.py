"""Memory that changes under stored blocks: found by readers and by the scrub, never served, and stored again."""

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

import kvpool
from kvpool.node.headers import RECORD_BYTES
from tests.integration.conftest import BLOCK_BYTES, Pool, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually

SEED = int(os.environ.get("KVPOOL_TEST_SEED", "20"))
"""Where bits are flipped; another one is tried with KVPOOL_TEST_SEED."""

BLOCKS = 8


@pytest.fixture
def bits():
    """Places to flip a bit at: (block, byte within it, bit)."""
    rng = np.random.default_rng(SEED)
    return lambda: (int(rng.integers(BLOCKS)), int(rng.integers(BLOCK_BYTES)), int(rng.integers(8)))


def flip(pool: Pool, name: str, block: np.ndarray, byte: int, bit: int) -> None:
    """Flip one bit of a stored block in its node's memory."""
    payload = pool.directory / f"kvpool-{name}.payload"
    where = payload.read_bytes().index(block.tobytes()) + byte
    flip_at(payload, where, bit)


def flip_at(path, where, bit):
    with path.open("r+b") as file:
        file.seek(where)
        [value] = file.read(1)
        file.seek(where)
        file.write(bytes([value ^ 1 << bit]))


def scrub_of(client, name="n0"):
    return next(node.scrub for node in client.status().nodes if node.node_id == name)


def run_verify(pool, *nodes):
    """(exit code, records by node, error) of `kvpool verify`."""
    command = [sys.executable, "-m", "kvpool.cli.main", "verify", *nodes, f"--pool={pool.uri}", "--format=json"]
    ended = subprocess.run([*command, "--timeout=5"], capture_output=True, check=False)
    records = msgspec.json.decode(ended.stdout)["nodes"] if ended.stdout else []
    return ended.returncode, {record["node_id"]: record for record in records}, ended.stderr.decode()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_reader_refuses_a_flipped_bit_and_the_pool_forgets_the_block(start_pool, rng, bits, transport):
    pool = start_pool(nodes=0)
    pool.start_node("n0", **{"scrub-bytes-per-s": 0})
    chain, blocks = random_chain(BLOCKS), random_blocks(rng, BLOCKS)
    client = pool.connect(transport)
    keyspace = open_blocks(client)
    keyspace.store(chain, list(blocks))
    block, byte, bit = bits()

    flip(pool, "n0", blocks[block], byte, bit)
    result = keyspace.load(chain, list(blank(BLOCKS)))

    assert result.loaded == block
    assert result.reasons[block] == kvpool.MissReason.VERIFY_FAILED
    assert client.stats().verify_failures == 1
    assert keyspace.match(chain) == kvpool.Match(block, kvpool.MissReason.VERIFY_FAILED)
    assert client.status().counters["bad_blocks"] == 1
    # The node looks at what was reported while it rests, and takes its memory out of use.
    eventually(lambda: scrub_of(client).retired_bytes == BLOCK_BYTES)
    assert keyspace.store(chain, list(blocks)).stored == 1
    loaded = blank(BLOCKS)
    assert keyspace.load(chain, list(loaded)).loaded == BLOCKS
    np.testing.assert_array_equal(blocks, loaded)
    assert run_verify(pool)[0] == 0


def test_the_scrub_finds_a_flipped_bit_that_nobody_reads(start_pool, rng, bits):
    pool = start_pool(nodes=0)
    pool.start_node("n0", **{"scrub-bytes-per-s": "1GiB", "scrub-interval": "50ms"})
    chain, blocks = random_chain(BLOCKS), random_blocks(rng, BLOCKS)
    client = pool.connect()
    keyspace = open_blocks(client)
    keyspace.store(chain, list(blocks))
    eventually(lambda: scrub_of(client).checked_blocks >= BLOCKS)
    assert scrub_of(client).bad_blocks == 0
    block, byte, bit = bits()

    flip(pool, "n0", blocks[block], byte, bit)

    eventually(lambda: scrub_of(client).bad_blocks == 1)
    assert keyspace.match(chain) == kvpool.Match(block, kvpool.MissReason.VERIFY_FAILED)
    assert client.stats().verify_failures == 0
    [node] = client.status().nodes
    assert node.scrub.retired_bytes == BLOCK_BYTES
    assert client.status().counters["capacity_bytes"] == (32 << 20) - BLOCK_BYTES
    assert keyspace.store(chain, list(blocks)).stored == 1
    assert keyspace.load(chain, list(blank(BLOCKS))).loaded == BLOCKS
    log = (pool.directory / "n0.log").read_text()
    assert log.count("bad_block") == 1
    assert chain[block].hex()[:8] in log
    assert chain[block].hex() not in log


def test_verify_finds_flipped_bits_node_by_node(start_pool, rng, bits):
    pool = start_pool(nodes=0)
    for name in ("n0", "n1"):
        pool.start_node(name, **{"scrub-bytes-per-s": 0})
    chain, blocks = random_chain(BLOCKS), random_blocks(rng, BLOCKS)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain, list(blocks))

    code, sound, _ = run_verify(pool)
    assert (code, sum(node["blocks"] for node in sound.values())) == (0, BLOCKS)
    block, byte, bit = bits()
    holds = [n for n in pool.nodes if blocks[block].tobytes() in (pool.directory / f"kvpool-{n}.payload").read_bytes()]
    [bad_node] = holds
    flip(pool, bad_node, blocks[block], byte, bit)
    code, found, error = run_verify(pool)

    assert code == 1
    assert {name: node["bad"] for name, node in found.items()} == {name: int(name == bad_node) for name in pool.nodes}
    assert found[bad_node]["size_bytes"] == found[bad_node]["blocks"] * BLOCK_BYTES
    assert f"1 on {bad_node}" in error
    assert keyspace.match(chain) == kvpool.Match(block, kvpool.MissReason.VERIFY_FAILED)
    assert run_verify(pool, bad_node)[0] == 0, "found once, and out of use since"


def test_verify_says_which_nodes_it_could_not_ask(start_pool):
    pool = start_pool(nodes=2)
    pool.kill(pool.nodes["n1"])
    client = pool.connect()
    eventually(lambda: any(node.state == "lost" for node in client.status().nodes))

    code, found, error = run_verify(pool)

    assert code == 3
    assert (found["n0"]["error"], found["n1"]["error"]) == (None, "the node is lost")
    assert "n1" in error
    code, _, error = run_verify(pool, "n2")
    assert code == 2
    assert "no node is called n2; the pool has n0, n1" in error
    assert run_verify(pool, "n0")[0] == 0


def test_a_header_changed_on_disk_costs_its_block_at_the_next_start(start_pool, rng, bits):
    pool = start_pool(nodes=1)
    chain, blocks = random_chain(BLOCKS), random_blocks(rng, BLOCKS)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain, list(blocks))
    pool.stop(pool.nodes["n0"])
    block, byte, bit = bits()
    headers = pool.directory / "kvpool-n0.headers"
    start = headers.read_bytes().index(chain[block]) - 56  # the hash's place in its record

    flip_at(headers, start + 4 + byte % (RECORD_BYTES - 4), bit)
    pool.start_node("n0")

    eventually(lambda: keyspace.match(chain[:1]).blocks == min(1, block))
    assert keyspace.match(chain).blocks == block
    assert keyspace.store(chain, list(blocks)).stored == 1
    loaded = blank(BLOCKS)
    assert keyspace.load(chain, list(loaded)).loaded == BLOCKS, "the blocks below it were there all the time"
    np.testing.assert_array_equal(blocks, loaded)
