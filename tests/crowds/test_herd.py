"""Two hundred clients lose a node, or the metadata service, at one moment: nothing collapses, and all come back."""

import sys

import pytest

from kvpool.client.retries import BURST, SHARE
from tests.crowds.crowd import CrowdSettings
from tests.crowds.process import alike, crowds
from tests.waiting import eventually

CLIENTS = 50
TRANSPORTS = ("tcp", "shm", "tcp", "unix")
CALLS = 2_000
"""So many calls of the crowd show that it goes on: ten of each client on average."""


@pytest.fixture
def pool(start_pool):
    return start_pool(nodes=4, size="16MiB", **{"heartbeat": "500ms", "node-ttl": "3s"})


def crowd_of(pool) -> list:
    return alike(CrowdSettings(pool.uri, CLIENTS, "", seed=7, chains=200, timeout_s=3.0), TRANSPORTS)


def check(report, calls: int) -> None:
    """Every call ended, with the right bytes or none, and few were repeated."""
    sys.stdout.write(f"{report}\n")  # shown by -s
    counts = report["counts"]
    assert counts["wrong"] == counts["hung"] == counts["verify_failures"] == 0, report
    clients = CLIENTS * len(TRANSPORTS)
    assert counts["retries"] <= BURST * clients + SHARE * calls, report
    assert report["most_retries"] <= BURST + SHARE * calls / clients * 3, report  # nobody calls three times the average


def test_a_node_lost_by_two_hundred_clients(pool, pool_client):
    with crowds(crowd_of(pool), pool.directory) as running:
        running.go_on("loaded_blocks", CALLS)
        pool.kill(pool.nodes["n0"])
        running.go_on("calls", CALLS)
        running.go_on("loaded_blocks", CALLS)
        running.go_on("stored_blocks", 100)
        assert {node.node_id for node in pool_client.status().nodes if node.state == "ready"} == {"n1", "n2", "n3"}
        pool.start_node("n0", "16MiB")
        running.go_on("calls", CALLS)
        report = running.finish()
    check(report, report["counts"]["calls"])
    assert report["misses"]["node_down"] > 0
    assert report["counts"]["reconnects"] == 0, "the metadata service was never out of reach"


def test_the_metadata_service_restarts_under_two_hundred_clients(pool, pool_client):
    with crowds(crowd_of(pool), pool.directory) as running:
        running.go_on("loaded_blocks", CALLS)
        pool.kill(pool.meta)
        running.go_on("calls", CALLS)
        pool.start_meta(**{"expected-nodes": 4, "heartbeat": "500ms", "node-ttl": "3s"})
        clients = CLIENTS * len(TRANSPORTS)
        eventually(lambda: running.report()["counts"]["reconnects"] >= clients)
        running.go_on("loaded_blocks", CALLS)
        running.go_on("stored_blocks", 100)
        report = running.finish()
    check(report, report["counts"]["calls"])
    assert pool_client.status().counters["refused_connections"] == 0


@pytest.fixture
def pool_client(pool):
    return pool.connect("tcp")
