"""What `docker-compose up` starts: healthy, narrow in what it may, and whole again after what happens to containers."""

import itertools
import json
import os
import subprocess

import pytest

from tests.compose.stack import NODES, SERVICES, Stack, why_not
from tests.waiting import eventually

BLOCKS = 32  # of client_script.py
_seeds = itertools.count(1)


@pytest.fixture
def stored(stack):
    """Seeds of chains that lie on every node."""
    seeds = [next(_seeds) for _ in range(6)]
    for seed in seeds:
        assert stack.client("store", seed)["stored"] == BLOCKS
    found = stack.metadata_metrics()
    assert all(found[f'kvpool_segment_blocks{{node="{node}",tier="memory"}}'] for node in NODES)
    return seeds


def loads(stack, seeds, **options):
    return [stack.client("load", seed, **options) for seed in seeds]


def all_came(answers):
    return all(answer["loaded"] == BLOCKS for answer in answers) and none_wrong(answers)


def none_wrong(answers):
    return not any(answer["wrong"] for answer in answers)


def test_all_services_are_healthy_and_the_client_gets_its_blocks_back(stack):
    assert all(stack.is_healthy(service) for service in SERVICES)
    pinged = json.loads(stack.compose("run", "--rm", "client", "ping", "--format", "json"))

    assert pinged["right"]
    assert list(pinged["loaded_bytes"]) == ["shm"]
    assert stack.metadata_is_ready()


def test_containers_may_do_no_more_than_they_must(stack):
    for service in SERVICES:
        settings = stack.settings(service)
        assert settings["HostConfig"]["ReadonlyRootfs"]
        assert settings["HostConfig"]["CapDrop"] == ["ALL"]
        assert settings["Config"]["User"] == "kvpool"
        published = settings["HostConfig"]["PortBindings"] or {}
        assert all(place["HostIp"] == "127.0.0.1" for places in published.values() for place in places)


def test_everybody_proves_who_he_is(stack):
    status = json.loads(stack.compose("run", "--rm", "client", "status", "--format", "json"))
    assert status["security"] == "tls"

    without = ["run", "--rm", "-e", "KVPOOL_TLS__DIR=", "client", "status"]
    with pytest.raises(AssertionError, match="it speaks TLS"):
        stack.compose(*without)
    for service in ("metadata", *NODES):
        listed = stack.inside(service, "ls", "/certs")
        assert "ca.pem" in listed
        assert "ca-key.pem" not in listed


@pytest.mark.parametrize(("transport", "used"), [("shm", "shm"), ("tcp", "tls")])
def test_a_block_goes_to_any_client_by_any_way(stack, stored, transport, used):
    answers = loads(stack, stored, transports=transport)

    assert all_came(answers)
    assert {way for answer in answers for way in answer["transports"]} == {used}


def test_a_killed_node_costs_misses_and_comes_back_with_its_blocks(stack, stored):
    stack.kill("node-1")
    eventually(lambda: stack.node_states().get("node-1") == "lost")

    meanwhile = loads(stack, stored)
    assert none_wrong(meanwhile)
    assert 0 < sum(answer["loaded"] == BLOCKS for answer in meanwhile) < len(stored)
    assert stack.client("store", next(_seeds))["stored"] == BLOCKS

    stack.start("node-1")
    assert all_came(loads(stack, stored))


def test_a_node_that_crashes_is_started_again_and_has_its_blocks(stack, stored):
    starts = stack.settings("node-2")["RestartCount"]

    stack.crash("node-2")

    eventually(lambda: stack.settings("node-2")["RestartCount"] > starts)
    stack.until_ready("node-2")
    assert all_came(loads(stack, stored))


def test_a_paused_node_holds_up_nobody_beyond_the_deadline(stack, stored):
    stack.pause("node-3")
    try:
        meanwhile = loads(stack, stored, transports="tcp", timeout_s=1.0)
    finally:
        stack.unpause("node-3")

    assert none_wrong(meanwhile)
    assert 0 < sum(answer["loaded"] == BLOCKS for answer in meanwhile) < len(stored)
    late = {reason for answer in meanwhile for reason in answer["reasons"]}
    assert late <= {"over_deadline", "node_down"}
    stack.until_ready("node-3")
    assert all_came(loads(stack, stored, transports="tcp"))


def test_a_node_cut_off_from_the_network_is_lost_and_found(stack, stored):
    stack.disconnect("node-1")
    try:
        eventually(lambda: stack.node_states().get("node-1") == "lost")
        meanwhile = loads(stack, stored, transports="tcp", timeout_s=2.0)
    finally:
        stack.reconnect("node-1")

    assert none_wrong(meanwhile)
    stack.until_ready("node-1")
    assert all_came(loads(stack, stored, transports="tcp"))


def test_a_metadata_service_that_restarts_learns_everything_from_the_nodes(stack, stored):
    stack.compose("restart", "metadata")

    eventually(stack.metadata_is_ready)
    assert all_came(loads(stack, stored))


def test_a_rolling_restart_of_all_nodes_keeps_the_blocks(stack, stored):
    for node in NODES:
        stack.compose("restart", node)
        stack.until_ready(node)

    assert all_came(loads(stack, stored))


def test_down_leaves_nothing():
    if reason := why_not():
        pytest.skip(reason)
    stack = Stack(f"kvpooldown{os.getpid()}")
    try:
        stack.up()
    finally:
        stack.down()

    for kind in ("container", "network", "volume"):
        all_of_them = ["-a"] if kind == "container" else []
        left = subprocess.run(
            ["docker", kind, "ls", "-q", *all_of_them, "--filter", f"name={stack.project}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert left.stdout == ""
