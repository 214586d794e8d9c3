"""Clients and a pool of two nodes, each on a host of its own, while the network between them is bad.

The clients are crowds that check every load: they get the right bytes or misses, all calls end, and when the network is
mended everything is found again.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crowds.crowd import CrowdSettings
from tests.crowds.process import Crowds, crowds
from tests.integration.conftest import Pool
from tests.netns.spaces import Network, Space, why_not
from tests.waiting import eventually

CLIENTS = 8
CHAINS = 24
"""All of them fit the nodes: what is not found was not reached."""

CALLS = 60

UNREACHED = ("node_down", "over_deadline")
"""Reasons of a miss that the network is to blame for."""


@dataclass
class Hosts:
    """Two crowds of clients, ``a`` and ``b``; each can be asked alone."""

    pool: Pool
    spaces: dict[str, Space]
    crowds: dict[str, Crowds]

    def go_on(self, what: str = "calls", times: int = CALLS, who: str = "ab") -> None:
        for name in who:
            self.crowds[name].go_on(what, times)

    def find_all(self) -> None:
        """Wait until every crowd finds whatever it looks for."""
        for crowd in self.crowds.values():
            eventually(lambda crowd=crowd: _finds_all(crowd))

    def said(self, event: str) -> int:
        """How often the metadata service has logged something."""
        return (self.pool.directory / "meta.log").read_text().count(event)

    def misses(self, who: str, *reasons: str) -> int:
        return sum(self.crowds[who].report()["misses"][reason] for reason in reasons)


def _finds_all(crowd: Crowds) -> bool:
    before = crowd.report()
    crowd.go_on("loads", CALLS)
    return crowd.report()["misses"] == before["misses"]


def _listening(role: str, space: Space, folder: Path) -> dict[str, object]:
    config = folder / f"{space.name}.yaml"
    config.write_text(f"{role}: {{insecure: true, listen: {space.address}}}\n")
    return {"config": config}


@pytest.fixture(scope="module")
def network_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not(lambda space: space.lossy(1)):
        pytest.skip(reason)
    tmp_path = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        spaces = {name: network.space(name) for name in ("meta", "n0", "n1", "a", "b")}
        pool = Pool(tmp_path, stack, grpc_port=7300)
        with spaces["meta"].entered():
            listening = _listening("meta", spaces["meta"], tmp_path)
            pool.start_meta(**listening, **{"heartbeat": "200ms", "node-ttl": "2s", "expected-nodes": 2})
        for name in ("n0", "n1"):
            with spaces[name].entered():
                pool.start_node(name, "16MiB", **_listening("node", spaces[name], tmp_path))
        found = {}
        for seed, name in enumerate("ab"):
            settings = CrowdSettings(pool.uri, CLIENTS, "tcp", seed, CHAINS, timeout_s=2.0, think_s=0.1, fill=True)
            with spaces[name].entered():
                found[name] = stack.enter_context(crowds([settings], tmp_path))
        yield Hosts(pool, spaces, found)
        for crowd in found.values():
            report = crowd.finish()
            counts = report["counts"]
            assert counts["wrong"] == counts["hung"] == counts["verify_failures"] == 0, report
            assert report["most_retries"] <= 10 + 0.1 * counts["calls"], report


@pytest.fixture
def hosts(network_hosts: Hosts) -> Iterator[Hosts]:
    """The same for all tests: each finds the network mended, and everything found."""
    network_hosts.find_all()
    yield network_hosts
    network_hosts.find_all()


def test_one_packet_in_five_is_lost(hosts):
    silent, misses = hosts.said("node_silent"), hosts.misses("b", *UNREACHED)
    with hosts.spaces["a"].lossy(20):
        hosts.go_on("loaded_blocks", who="a")
        hosts.go_on()
        assert hosts.misses("b", *UNREACHED) == misses
    assert hosts.said("node_silent") == silent


def test_a_slow_and_uneven_network(hosts):
    if reason := why_not(lambda space: space.delayed("1ms", "1ms")):
        pytest.skip(reason)
    silent = hosts.said("node_silent")
    with hosts.spaces["a"].delayed("200ms", "50ms"):
        hosts.go_on("loaded_blocks", who="a")
        hosts.go_on()
    assert hosts.said("node_silent") == silent


def test_a_node_that_one_client_cannot_reach_stays_in_the_pool_for_the_others(hosts):
    before = {who: hosts.misses(who, *UNREACHED) for who in "ab"}
    left = hosts.said("node_silent") + hosts.said("node_left")
    with hosts.spaces["a"].deaf_to(hosts.spaces["n0"]):
        eventually(lambda: hosts.misses("a", *UNREACHED) > before["a"])
        hosts.go_on("loaded_blocks")  # n1, and copies there, serve both
        assert hosts.said("node_silent") + hosts.said("node_left") == left
    assert hosts.misses("b", *UNREACHED) == before["b"]


@contextmanager
def node_without_its_service(hosts: Hosts) -> Iterator[None]:
    with hosts.spaces["n0"].apart_from(hosts.spaces["meta"]):
        yield


@contextmanager
def deaf_node(hosts: Hosts) -> Iterator[None]:
    """What the node says does not arrive; it hears the service."""
    with hosts.spaces["n0"].deaf_to(hosts.spaces["meta"]):
        yield


@pytest.mark.parametrize("partition", [node_without_its_service, deaf_node])
def test_a_node_apart_from_its_service_is_lost_and_found_again(hosts, partition):
    silent, ready = hosts.said("node_silent"), hosts.said("node_ready")
    with partition(hosts):
        eventually(lambda: hosts.said("node_silent") > silent)
        hosts.go_on("loaded_blocks")
        hosts.go_on()
    eventually(lambda: hosts.said("node_ready") > ready)


def test_clients_apart_from_the_service_are_told_by_their_deadlines(hosts):
    before = {who: hosts.misses(who, *UNREACHED) for who in "ab"}
    with hosts.spaces["a"].apart_from(hosts.spaces["meta"]):
        hosts.go_on()
        assert hosts.misses("a", *UNREACHED) > before["a"]
        assert hosts.misses("b", *UNREACHED) == before["b"]
