"""UCX between two hosts: over the network that joins them, and where a firewall lets only kvpool's own port through."""

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.integration.conftest import BLOCK_BYTES, Pool
from tests.netns.spaces import Network, why_not

BLOCKS = 50

CLIENT = f"""
import json, sys, kvpool, numpy as np
first = int(sys.argv[2])
with kvpool.connect(sys.argv[1], transports=["ucx", "tcp"]) as pool:
    blocks = pool.namespace(kvpool.Namespace(model="hosts", block_tokens=16, block_bytes={BLOCK_BYTES}))
    chain = [bytes([first + i]) * 32 for i in range({BLOCKS})]
    data = np.random.default_rng(first).integers(0, 256, ({BLOCKS}, {BLOCK_BYTES}), np.uint8)
    loaded = np.zeros_like(data)
    pool.status(reach=True)
    if sys.argv[3] == "store":
        stored = [blocks.store(chain, data, timeout_s=10).stored for _ in range(2)]
    else:
        stored = []
    counts = [blocks.load(chain, loaded, timeout_s=10).loaded for _ in range(2)]
    (node,) = pool.status(reach=True).nodes
    stats = pool.stats()
    print(json.dumps({{
        "stored": stored, "loaded": counts, "equal": bool((loaded == data).all()),
        "carrier": node.carrier, "fallbacks": stats.fallbacks, "way": stats.loaded_bytes,
    }}))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A service, a node that serves UCX, and a client's host."""
    if reason := why_not(lambda space: space.reached_at(1)):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("UCX_TLS", "tcp,self")
        network = stack.enter_context(Network())
        spaces = {name: network.space(name) for name in ("meta", "n0", "a")}
        pool = Pool(folder, stack, grpc_port=7300)
        for role, name in (("meta", "meta"), ("node", "n0")):
            (folder / f"{name}.yaml").write_text(f"{role}: {{insecure: true, listen: {spaces[name].address}}}\n")
        with spaces["meta"].entered():
            pool.start_meta(config=folder / "meta.yaml", **{"expected-nodes": 1})
        with spaces["n0"].entered():
            pool.start_node("n0", "32MiB", ucx=True, config=folder / "n0.yaml")
        yield pool, spaces


def ask(hosts, first: int, what: str = "store") -> dict:
    """Store some blocks of the client's host, if asked to, and load them twice."""
    pool, spaces = hosts
    with spaces["a"].entered():
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, pool.uri, str(first), what], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_blocks_travel_between_hosts_over_ucx(hosts):
    before = hosts[1]["n0"].sent_bytes()

    said = ask(hosts, 1)

    assert (said["stored"], said["loaded"], said["equal"]) == ([BLOCKS, 0], [BLOCKS, BLOCKS], True)
    assert said["way"] == {"ucx": 2 * BLOCKS * BLOCK_BYTES}
    assert (said["carrier"], said["fallbacks"]) == ("tcp/eth0", 0)
    assert hosts[1]["n0"].sent_bytes() - before > 2 * BLOCKS * BLOCK_BYTES


def test_behind_a_firewall_that_stops_ucx_every_block_is_read_all_the_same(hosts):
    ask(hosts, 100)
    node = hosts[0].ready["n0"]
    kept = [int(node[name].rpartition(":")[2]) for name in ("data", "grpc")]

    with hosts[1]["n0"].reached_at(*kept):
        said = ask(hosts, 100, "load")

    assert (said["loaded"], said["equal"]) == ([BLOCKS, BLOCKS], True)
    assert (said["carrier"], said["fallbacks"]) == ("frames", 1)


def test_behind_a_firewall_that_stops_the_nodes_ucx_every_block_is_stored_all_the_same(hosts):
    with hosts[1]["a"].reached_at():
        said = ask(hosts, 200)

    assert said["fallbacks"] == 1
    assert (said["stored"], said["loaded"], said["equal"]) == ([BLOCKS, 0], [BLOCKS, BLOCKS], True)
