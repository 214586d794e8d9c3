"""Health and metrics of real processes: alive is not ready, and what they count adds up."""

import signal

import pytest

from kvpool.bench.process import RoleProcess
from kvpool.core.errors import UnavailableError
from tests.http_pages import ask, metrics
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually


def verdicts(address):
    return ask(address, "/healthz").status, ask(address, "/readyz").status


def test_a_service_without_nodes_is_alive_and_not_ready(start_pool):
    pool = start_pool(nodes=0, **{"recovery-deadline": "1h"})
    meta = pool.meta_ready["http"]

    assert verdicts(meta) == (200, 503)
    assert ask(meta, "/readyz").text == "no: recovering: nodes have yet to report what they hold\n"
    pool.start_node("n0")
    eventually(lambda: verdicts(meta) == (200, 200))
    pool.kill(pool.nodes["n0"])
    eventually(lambda: verdicts(meta) == (200, 503))
    assert ask(meta, "/readyz").text == "no: no node is ready\n"


def test_a_service_that_recovers_is_not_ready_until_its_nodes_have_reported(start_pool):
    pool = start_pool(nodes=1)
    pool.kill(pool.meta)
    pool.signal(pool.nodes["n0"], signal.SIGSTOP)

    pool.start_meta(**{"expected-nodes": 1})

    meta = pool.meta_ready["http"]
    assert verdicts(meta) == (200, 503)
    assert metrics(meta)["kvpool_recovering"] == 1
    pool.signal(pool.nodes["n0"], signal.SIGCONT)
    eventually(lambda: verdicts(meta) == (200, 200))
    assert metrics(meta)["kvpool_recovering"] == 0


def test_a_node_is_ready_while_the_service_counts_it_in(start_pool):
    pool = start_pool(nodes=1)
    node = pool.ready["n0"]["http"]
    assert verdicts(node) == (200, 200)

    pool.kill(pool.meta)

    eventually(lambda: verdicts(node) == (200, 503))
    assert ask(node, "/readyz").text == "no: the metadata service has not taken the node in\n"
    pool.start_meta(**{"expected-nodes": 1})
    eventually(lambda: verdicts(node) == (200, 200))


def test_a_draining_node_is_alive_and_not_ready(start_pool):
    pool = start_pool(nodes=2)
    with pool.connect() as client:
        client.drain("n0", stay=True)

        eventually(lambda: verdicts(pool.ready["n0"]["http"]) == (200, 503))

        assert ask(pool.ready["n0"]["http"], "/readyz").text == "no: the node drains\n"
        assert metrics(pool.ready["n0"]["http"])["kvpool_node_draining"] == 1
        eventually(lambda: metrics(pool.meta_ready["http"])['kvpool_nodes{state="draining"}'] == 1)
        client.cancel_drain("n0")
        eventually(lambda: verdicts(pool.ready["n0"]["http"]) == (200, 200))


@pytest.mark.parametrize("role", ["meta", "node"])
def test_a_port_in_use_is_one_line_and_nothing_is_left(pool, tmp_path, role):
    taken = int(pool.meta_ready["http"].rpartition(":")[2])
    options = {"http-port": taken, "grpc-port": 0}
    options |= {"framed-port": 0} if role == "meta" else {
        "meta": pool.uri, "node-id": "other", "data-port": 0, "size": "1MiB",
        "segment-dir": tmp_path, "unix-socket": tmp_path / "x.sock",
    }  # fmt: skip

    with RoleProcess(role, options, tmp_path / "log") as process, pytest.raises(UnavailableError, match="status 1"):
        process.ready()

    last = (tmp_path / "log").read_text().strip().splitlines()[-1]
    assert f"cannot listen on 127.0.0.1:{taken}" in last
    assert "choose another --http-port" in last
    assert not list(tmp_path.glob("kvpool-*"))


def test_what_is_counted_adds_up(start_pool, rng):
    """After stores, loads, evictions and a restart: hits and misses are the look-ups, bytes the blocks."""
    pool = start_pool(nodes=2, size="1MiB")
    client = pool.connect()
    keyspace = open_blocks(client)
    chains = [random_chain(8) for _ in range(6)]
    for chain in chains:
        keyspace.store(chain, random_blocks(rng, 8))
    for chain in chains:
        keyspace.load(chain, blank(8))
        keyspace.match(chain)
        keyspace.match([*chain, *random_chain(1)])

    found = metrics(pool.meta_ready["http"])

    lookups = 2 * len(chains)
    asked = (8 + 9) * 16 * len(chains)
    assert found["kvpool_lookups_total"] == lookups
    assert found["kvpool_lookup_tokens_total"] == asked
    whole = sum(keyspace.match(chain).blocks for chain in chains)
    assert found["kvpool_hit_tokens_total"] == 2 * 16 * whole
    assert found['kvpool_removed_blocks_total{reason="evicted"}'] == 8 * len(chains) - found["kvpool_blocks"] > 0
    ended_early = sum(value for name, value in found.items() if name.startswith("kvpool_lookup_misses_total"))
    assert lookups - ended_early == sum(keyspace.match(chain).blocks == 8 for chain in chains)
    assert_used_is_the_sum_of_blocks(pool)

    pool.kill(pool.meta)
    pool.start_meta(**{"expected-nodes": 2})
    eventually(lambda: ask(pool.meta_ready["http"], "/readyz").status == 200)
    assert_used_is_the_sum_of_blocks(pool)


def assert_used_is_the_sum_of_blocks(pool):
    meta = metrics(pool.meta_ready["http"])
    for name in pool.nodes:
        node = metrics(pool.ready[name]["http"])
        used = meta[f'kvpool_segment_used_bytes{{node="{name}",tier="memory"}}']
        assert used == meta[f'kvpool_segment_blocks{{node="{name}",tier="memory"}}'] * BLOCK_BYTES
        assert used == node['kvpool_store_bytes{state="blocks",tier="memory"}']
        states = sum(value for key, value in node.items() if key.startswith("kvpool_store_bytes{"))
        assert states == node['kvpool_store_capacity_bytes{tier="memory"}'] == 1 << 20


def test_bytes_and_times_of_the_data_plane_are_counted(start_pool, rng):
    pool = start_pool(nodes=1)
    keyspace = open_blocks(pool.connect("tcp"))
    chain = random_chain(4)
    keyspace.store(chain, random_blocks(rng, 4))
    assert keyspace.load(chain, blank(4)).loaded == 4

    meta, node = metrics(pool.meta_ready["http"]), metrics(pool.ready["n0"]["http"])

    for direction in ("in", "out"):
        assert node[f'kvpool_node_bytes_total{{direction="{direction}",transport="tcp"}}'] == 4 * BLOCK_BYTES
    for step in ("reserve", "commit", "locate"):
        assert meta[f'kvpool_meta_request_seconds_count{{step="{step}"}}'] == 1
        assert meta[f'kvpool_meta_request_seconds_bucket{{le="+Inf",step="{step}"}}'] == 1
        assert 0 < meta[f'kvpool_meta_request_seconds_sum{{step="{step}"}}'] < 10
    assert node['kvpool_node_request_seconds_count{step="read"}'] == 1
    assert node['kvpool_node_request_seconds_count{step="prepare"}'] == 1
