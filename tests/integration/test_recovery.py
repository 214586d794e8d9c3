"""Restarts and losses of whole processes: what comes back, what is answered meanwhile, who is refused."""

import json
import signal
import subprocess
import sys

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvpool
from kvpool.core.errors import ProtocolError
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import PrepareReply, PrepareRequest
from kvpool.v1 import store_node_pb2, store_node_pb2_grpc
from tests.integration.conftest import BLOCK_BYTES, Pool, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually

RECOVERING = kvpool.MissReason.RECOVERING
IMPATIENT = {"heartbeat": "0.2s", "node-ttl": "0.8s"}
"""A service that gives a silent node up soon."""


def health_of(pool: Pool, service: str) -> str:
    with grpc.insecure_channel(pool.uri.removeprefix("grpc://")) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def kvpool_status(pool: Pool, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvpool.cli.main", "status", "--pool", pool.uri, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def state_of(client: kvpool.Client, name: str) -> str | None:
    return next((node.state for node in client.status().nodes if node.node_id == name), None)


def prepare_is_refused(pool: Pool, grant: bytes) -> None:
    """What a writer is told that brings n0 a grant of another session."""
    writer = Connection(f"unix://{pool.directory}/n0.sock", "writer", 5.0)
    with pytest.raises(ProtocolError, match="session"):
        writer.call(PrepareRequest(grant), PrepareReply, 5.0)
    writer.close()


def segment_head(pool: Pool, keyspace: kvpool.Keyspace, rng) -> tuple[list[bytes], np.ndarray]:
    """A chain whose first half fills n0; its second half is on the node that is started then: n1."""
    chain, blocks = random_chain(8), random_blocks(rng, 8)
    assert keyspace.store(chain[:4], list(blocks[:4])).stored == 4
    pool.start_node("n1")
    assert keyspace.store(chain, list(blocks)).stored == 4
    return chain, blocks


def test_a_restarted_service_is_live_but_not_ready_until_its_nodes_have_reported(start_pool, rng):
    pool = start_pool(nodes=2)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = random_chain(4), random_blocks(rng, 4)
    keyspace.store(chain, list(blocks))
    home = "n0" if client.status().nodes[0].blocks else "n1"

    pool.signal(pool.nodes[home], signal.SIGSTOP)
    try:
        pool.kill(pool.meta)
        pool.start_meta(**{"expected-nodes": 2})
        eventually(lambda: keyspace.match(chain).reason == RECOVERING)
        other = ({"n0", "n1"} - {home}).pop()
        eventually(lambda: state_of(client, other) == "ready")

        assert keyspace.match(chain) == kvpool.Match(0, RECOVERING)
        assert keyspace.load(chain, list(blank(4))).reasons[0] == RECOVERING
        assert health_of(pool, "") == "SERVING"
        assert health_of(pool, "kvpool.v1.Membership") == "SERVING"
        assert health_of(pool, "kvpool.v1.Directory") == "NOT_SERVING"
        shown = kvpool_status(pool)
        assert "1 of 2 nodes have reported" in shown.stdout
        told = json.loads(kvpool_status(pool, "--format", "json").stdout)["recovery"]
        assert (told["active"], told["nodes_reported"], told["nodes_expected"]) == (True, 1, 2)
    finally:
        pool.signal(pool.nodes[home], signal.SIGCONT)

    eventually(lambda: keyspace.match(chain) == kvpool.Match(4, None))
    eventually(lambda: health_of(pool, "kvpool.v1.Directory") == "SERVING")
    assert "recovering" not in kvpool_status(pool).stdout
    assert keyspace.match(random_chain(1)).reason == kvpool.MissReason.COLD
    loaded = blank(4)
    assert keyspace.load(chain, list(loaded)).loaded == 4
    np.testing.assert_array_equal(blocks, loaded)


def test_without_expected_nodes_a_short_wait_ends_the_recovery(start_pool):
    pool = start_pool(nodes=0, **{"recovery-wait": "0.1s", "heartbeat": "0.1s"})
    assert health_of(pool, "kvpool.v1.Directory") == "NOT_SERVING"
    pool.start_node("n0")
    eventually(lambda: health_of(pool, "kvpool.v1.Directory") == "SERVING")


@pytest.mark.parametrize("end", [Pool.kill, Pool.stop], ids=["killed", "stopped"])
def test_a_rolling_restart_of_all_nodes_keeps_what_they_hold(start_pool, rng, end):
    pool = start_pool(nodes=3)
    keyspace = open_blocks(pool.connect())
    chains = [random_chain(8) for _ in range(24)]
    blocks = random_blocks(rng, 8)
    for chain in chains:
        assert keyspace.store(chain, list(blocks)).stored == 8

    for name in list(pool.nodes):
        end(pool, pool.nodes[name])
        pool.start_node(name)

    hits = sum(keyspace.match(chain).blocks for chain in chains)
    assert hits >= 0.99 * 8 * len(chains)
    loaded = blank(8)
    assert sum(keyspace.load(chain, list(loaded)).loaded for chain in chains) >= 0.99 * 8 * len(chains)
    np.testing.assert_array_equal(blocks, loaded)


def test_descendants_of_a_lost_node_sleep_until_it_returns(start_pool, rng):
    pool = start_pool(nodes=1, size="256KiB")
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = segment_head(pool, keyspace, rng)
    assert [node.blocks for node in client.status().nodes] == [4, 4]

    pool.kill(pool.nodes["n0"])
    eventually(lambda: state_of(client, "n0") == "lost")

    assert keyspace.match(chain) == kvpool.Match(0, kvpool.MissReason.NODE_DOWN)
    assert client.status().counters["blocks"] == 4, "what the other node holds is kept"
    pool.start_node("n0", size="256KiB")
    assert keyspace.match(chain) == kvpool.Match(8, None)
    loaded = blank(8)
    assert keyspace.load(chain, list(loaded)).loaded == 8
    np.testing.assert_array_equal(blocks, loaded)


def test_a_slot_that_was_half_written_when_its_node_was_killed_rests_in_quarantine(start_pool, rng):
    pool = start_pool(nodes=1)
    keyspace = open_blocks(pool.connect())
    reservation = keyspace.reserve(random_chain(2))
    writer = Connection(f"unix://{pool.directory}/n0.sock", "writer", 5.0)
    writer.call(PrepareRequest(reservation.grants[0].grant), PrepareReply, 5.0)

    pool.kill(pool.nodes["n0"])
    writer.close()
    pool.start_node("n0")

    with grpc.insecure_channel(pool.ready["n0"]["grpc"].removeprefix("grpc://")) as channel:
        stat = store_node_pb2_grpc.StoreNodeStub(channel).Stat(store_node_pb2.StatRequest(), timeout=5)
    assert stat.quarantined_bytes == 2 * BLOCK_BYTES
    assert keyspace.match(reservation.hashes).blocks == 0


def test_a_frozen_node_is_lost_refused_and_reconciled_when_it_goes_on(start_pool, rng):
    pool = start_pool(nodes=1, **IMPATIENT)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = random_chain(4), random_blocks(rng, 4)
    keyspace.store(chain, list(blocks))
    reservation = keyspace.reserve(random_chain(2))

    pool.signal(pool.nodes["n0"], signal.SIGSTOP)
    try:
        eventually(lambda: state_of(client, "n0") == "lost")
        assert keyspace.match(chain) == kvpool.Match(0, kvpool.MissReason.NODE_DOWN)
    finally:
        pool.signal(pool.nodes["n0"], signal.SIGCONT)
    written = keyspace.write(reservation, list(random_blocks(rng, 2)))

    assert written.committed == ()
    eventually(lambda: state_of(client, "n0") == "ready")
    prepare_is_refused(pool, reservation.grants[0].grant)
    assert keyspace.match(chain) == kvpool.Match(4, None)
    assert keyspace.match(reservation.hashes).blocks == 0
    loaded = blank(4)
    assert keyspace.load(chain, list(loaded)).loaded == 4
    np.testing.assert_array_equal(blocks, loaded)


def test_a_frozen_service_that_goes_on_gives_up_no_node_for_the_silence_it_slept_through(start_pool, rng):
    pool = start_pool(nodes=1, **IMPATIENT)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain = random_chain(2)
    keyspace.store(chain, list(random_blocks(rng, 2)))

    pool.signal(pool.meta, signal.SIGSTOP)
    try:
        # Longer than a node may be silent.
        assert keyspace.match(chain, timeout_s=1.5).reason == kvpool.MissReason.OVER_DEADLINE
    finally:
        pool.signal(pool.meta, signal.SIGCONT)

    eventually(lambda: keyspace.match(chain).blocks == 2)
    assert client.status().counters["lost_blocks"] == 0


def test_a_frozen_service_can_do_no_harm_once_its_node_obeys_another(start_pool, rng):
    old = start_pool(nodes=1)
    keyspace = open_blocks(old.connect(), model="fenced")
    chain, blocks = random_chain(4), random_blocks(rng, 4)
    keyspace.store(chain, list(blocks))
    reservation = keyspace.reserve(random_chain(2))
    others = keyspace.reserve(random_chain(1))

    old.signal(old.meta, signal.SIGSTOP)
    new = Pool(old.directory, old.stack)
    try:
        old.stop(old.nodes["n0"])
        new.start_meta(**{"expected-nodes": 1})
        new.start_node("n0")
        fresh = open_blocks(new.connect(), model="fenced")
        assert fresh.match(chain) == kvpool.Match(4, None)
    finally:
        old.signal(old.meta, signal.SIGCONT)

    assert keyspace.write(reservation, list(random_blocks(rng, 2))).committed == ()
    for grant in (*reservation.grants, *others.grants):
        prepare_is_refused(new, grant.grant)
    eventually(lambda: keyspace.match(chain) == kvpool.Match(0, kvpool.MissReason.NODE_DOWN))
    loaded = blank(4)
    assert fresh.load(chain, list(loaded)).loaded == 4
    np.testing.assert_array_equal(blocks, loaded)
