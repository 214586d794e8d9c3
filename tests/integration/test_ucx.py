"""Bytes over UCX between real processes, and what becomes of them when one of those dies, freezes or starts anew.

UCX runs over TCP here, where it does what it does over RDMA in software: that is the harder case, since the process
that is read from must answer.
"""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

import kvpool
from kvpool.client.locating import locate
from kvpool.client.nodes import Use
from kvpool.transport import ReadBatch, ReadStatus
from kvpool.transport.blocks import Blocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.ucx.messages import OfferRequest, Region
from kvpool.transport.ucx.shared import _shared
from kvpool.transport.wire.connection import Connection
from kvpool.v1 import store_node_pb2, store_node_pb2_grpc
from tests.integration.conftest import BLOCK_BYTES, Pool, blank, open_blocks, random_blocks, random_chain
from tests.integration.test_disk import assert_loads, put_on_disk
from tests.integration.test_disk import start_node as start_node_with_disk
from tests.waiting import eventually

TEST_S_MAX = 120
"""Pytest ends a test before a call with such a deadline would run out."""

HELPER = "kvpool.transport.ucx.helper"


@pytest.fixture(autouse=True)
def tcp_underneath(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture(scope="module")
def long_lived_pool(tmp_path_factory):
    """A pool for all tests here; what one breaks is whole again before the next."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta(**{"expected-nodes": 1})
        yield pool


@pytest.fixture
def pool(long_lived_pool):
    if "n0" not in long_lived_pool.nodes or not psutil.pid_exists(long_lived_pool.nodes["n0"].pid):
        long_lived_pool.start_node("n0", "512MiB", ucx=True)
    with kvpool.connect(long_lived_pool.uri, transports=["tcp"]) as client:
        segment_id = bytes.fromhex(client.status().nodes[0].segments[0].segment_id)
    with closing(Connection(long_lived_pool.ready["n0"]["data"], "test", 60)) as node:
        node.call(OfferRequest(segment_id), Region, 60)  # its UCX process may have ended: then it is started again
    with ExitStack() as stack:
        yield replace(long_lived_pool, stack=stack)


def helper_of(pid: int) -> psutil.Process:
    """The UCX process of a process."""
    (found,) = [child for child in psutil.Process(pid).children() if HELPER in child.cmdline()]
    return found


def used_bytes(pool: Pool, node_id: str) -> int:
    """What a node's blocks take, those that are being written included, as it says itself."""
    with grpc.insecure_channel(pool.ready[node_id]["grpc"].removeprefix("grpc://")) as channel:
        node = store_node_pb2_grpc.StoreNodeStub(channel)
        return node.Stat(store_node_pb2.StatRequest(), timeout=5).node.segments[0].used_bytes


def unread_bytes(process: psutil.Process) -> int:
    """What has arrived for a frozen process over TCP."""
    ends = {(c.laddr.port, c.raddr.port) for c in process.net_connections("tcp4") if c.raddr}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [(_port(row[1]), _port(row[2]), int(row[4].partition(":")[2], 16)) for row in rows]
    return sum(unread for ours, theirs, unread in found if (ours, theirs) in ends)


def _port(address: str) -> int:
    return int(address.partition(":")[2], 16)


def nothing_is_lent() -> bool:
    return all(side.arena.leased_bytes == 0 for side in _shared.values())


class Frozen:
    """A process that does nothing, while the block runs."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process

    def __enter__(self):
        self.process.suspend()
        eventually(lambda: all(_state(self.process.pid, t.id) == "T" for t in self.process.threads()))
        return self.process

    def __exit__(self, *_):
        if self.process.is_running():
            self.process.resume()


def _state(pid: int, thread: int) -> str:
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


def test_another_client_loads_what_one_stored(pool, rng):
    chain, blocks, loaded = random_chain(200), random_blocks(rng, 200), blank(200)
    writer = open_blocks(pool.connect("ucx"), model="shared")
    client = pool.connect("ucx")
    reader = open_blocks(client, model="shared")

    stored = writer.store(chain, blocks)
    result = reader.load(chain, loaded)

    assert stored == kvpool.StoreResult(stored=200, size_bytes=200 * BLOCK_BYTES)
    assert (result.loaded, result.size_bytes) == (200, 200 * BLOCK_BYTES)
    np.testing.assert_array_equal(blocks, loaded)
    assert client.stats().loaded_bytes == {"ucx": 200 * BLOCK_BYTES}
    assert nothing_is_lent()


@pytest.mark.parametrize("others", ["shm", "tcp"])
def test_blocks_go_in_over_one_transport_and_out_over_another(pool, rng, others):
    for first, second in (("ucx", others), (others, "ucx")):
        chain, blocks, loaded = random_chain(8), random_blocks(rng, 8), blank(8)
        assert open_blocks(pool.connect(first), model=f"from-{first}").store(chain, blocks).stored == 8
        assert open_blocks(pool.connect(second), model=f"from-{first}").load(chain, loaded).loaded == 8
        np.testing.assert_array_equal(blocks, loaded)


# The longest goes through frames: it would take too much of the region at once.
@pytest.mark.parametrize("block_bytes", [1, 4095, 4097, 300_000, 5 << 20, 20 << 20])
def test_blocks_of_any_length_keep_every_byte(pool, rng, block_bytes):
    chain, blocks, loaded = random_chain(3), random_blocks(rng, 3, block_bytes), blank(3, block_bytes)
    keyspace = open_blocks(pool.connect("ucx"), block_bytes)

    assert keyspace.store(chain, blocks).stored == 3
    assert keyspace.load(chain, loaded).loaded == 3
    np.testing.assert_array_equal(blocks, loaded)


def test_pieces_and_slices_are_gathered_and_scattered(pool, rng):
    chain, blocks, loaded = random_chain(6), random_blocks(rng, 6), blank(6)
    keyspace = open_blocks(pool.connect("ucx"))
    cuts = (0, 10, 5000, BLOCK_BYTES)

    keyspace.store(chain, [[block[a:b] for a, b in pairwise(cuts)] for block in blocks])
    result = keyspace.load(chain, list(loaded[2:]), first=2)

    assert result.loaded == 4
    np.testing.assert_array_equal(blocks[2:], loaded[2:])


def test_calls_of_many_threads_share_one_region(pool, rng):
    client = pool.connect("ucx", streams=4, timeout_s=30)
    keyspace = open_blocks(client)

    def one(seed: int) -> bool:
        mine, chain = random_blocks(np.random.default_rng(seed), 120), random_chain(120)
        loaded = blank(120)
        return (
            keyspace.store(chain, mine).stored == 120
            and keyspace.load(chain, loaded).loaded == 120
            and np.array_equal(mine, loaded)
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(16)))
    assert nothing_is_lent()


def test_a_slot_that_was_given_to_another_block_is_refused(start_pool, rng):
    pool = start_pool(nodes=0)
    pool.start_node("n0", "1MiB", ucx=True)
    keyspace = open_blocks(pool.connect("ucx"))
    old, loaded = random_chain(16), blank(16)
    keyspace.store(old, random_blocks(rng, 16))
    client, namespace = keyspace._client, keyspace.namespace
    copies = locate(keyspace, b"".join(old), 0, range(16), 0, Deadline(5))
    node, segment = client._nodes.find(int(copies.segment[0]), client._meta.topology)

    assert keyspace.store(random_chain(16), random_blocks(rng, 16)).stored == 16
    batch = ReadBatch(
        segment.segment_id,
        namespace.seed,
        BLOCK_BYTES,
        0,
        b"".join(old),
        copies.slot,
        copies.generation,
        copies.checksum,
        Blocks(BLOCK_BYTES, whole=loaded.reshape(-1)),
    )
    statuses = client._nodes.transport(node, Deadline(5), Use.READ).read(batch, Deadline(5))

    assert set(statuses) == {ReadStatus.BAD}


def test_what_lies_on_disk_comes_through_frames_and_what_lies_in_memory_over_ucx(start_pool, rng):
    pool = start_pool(nodes=0)
    start_node_with_disk(pool, ucx=True)
    client = pool.connect("ucx")
    keyspace = open_blocks(client)
    chain, blocks = put_on_disk(client, keyspace, rng)

    (node,) = client.status(reach=True).nodes
    assert_loads(keyspace, chain, blocks)

    assert (node.transport, node.carrier) == ("ucx", "tcp/lo")
    assert client.stats().loaded_bytes["disk"] == blocks.nbytes
    eventually(lambda: client.status().counters["promoted_blocks"] == len(chain))
    in_memory_before = client.stats().loaded_bytes["ucx"]
    assert_loads(keyspace, chain, blocks)
    assert client.stats().loaded_bytes["ucx"] == in_memory_before + blocks.nbytes
    assert client.stats().verify_failures == 0
    assert nothing_is_lent()


def test_a_node_killed_in_mid_read_is_a_miss_at_once_and_its_blocks_return_with_it(pool, rng):
    chain, blocks, loaded = random_chain(50), random_blocks(rng, 50), blank(50)
    keyspace = open_blocks(pool.connect("ucx"))
    keyspace.store(chain, blocks)
    keyspace.load(chain[:1], blank(1))

    with ThreadPoolExecutor(1) as threads, Frozen(helper_of(pool.nodes["n0"].pid)):
        reading = threads.submit(keyspace.load, chain, loaded, timeout_s=TEST_S_MAX)
        eventually(lambda: not nothing_is_lent())
        pool.kill(pool.nodes["n0"])
        missed = reading.result()  # long before its deadline: the test's own time is less

    assert missed.loaded == 0
    assert set(missed.reasons) == {kvpool.MissReason.NODE_DOWN}
    pool.start_node("n0", "512MiB", ucx=True)
    eventually(lambda: keyspace.match(chain).blocks == 50)
    eventually(lambda: keyspace.load(chain, loaded).loaded == 50)
    np.testing.assert_array_equal(blocks, loaded)
    eventually(nothing_is_lent)


def test_a_read_over_its_deadline_never_writes_to_memory_that_was_given_back(pool, rng):
    chain, blocks, loaded, other = random_chain(50), random_blocks(rng, 50), blank(50), blank(50)
    client = pool.connect("ucx")
    keyspace = open_blocks(client)
    keyspace.store(chain, blocks)
    keyspace.load(chain[:1], blank(1))

    with Frozen(helper_of(pool.nodes["n0"].pid)):
        with Frozen(psutil.Process(pool.nodes["n0"].pid)):
            late = keyspace.load(chain, loaded, timeout_s=0.3)
        assert not nothing_is_lent(), "the transfer still goes on"
        assert late.loaded == 0
        assert set(late.reasons) == {kvpool.MissReason.OVER_DEADLINE}
        through_frames = keyspace.load(chain, other, timeout_s=60)
        assert client.stats().fallbacks == 1

    eventually(nothing_is_lent)
    assert not loaded.any()
    assert through_frames.loaded == 50, "the node itself answers"
    np.testing.assert_array_equal(blocks, other)
    eventually(lambda: keyspace.load(chain, loaded).loaded == 50)
    np.testing.assert_array_equal(blocks, loaded)


def test_closing_the_client_ends_a_read_under_way(pool, rng):
    chain = random_chain(50)
    client = pool.connect("ucx")
    keyspace = open_blocks(client)
    keyspace.store(chain, random_blocks(rng, 50))
    keyspace.load(chain[:1], blank(1))
    helper = helper_of(os.getpid())

    with ThreadPoolExecutor(1) as threads, Frozen(helper_of(pool.nodes["n0"].pid)):
        reading = threads.submit(keyspace.load, chain, blank(50), timeout_s=TEST_S_MAX)
        eventually(lambda: not nothing_is_lent())
        client.close()  # long before the deadline of the read
        with suppress(kvpool.ClosedError):
            assert reading.result().loaded == 0

    assert not helper.is_running()


CLIENT = """
import sys, kvpool, numpy as np
pool = kvpool.connect(sys.argv[1], transports=["ucx"], timeout_s=60)
blocks = pool.namespace(kvpool.Namespace(model=sys.argv[2], block_tokens=16, block_bytes=65536))
chain = [bytes([i]) * 32 for i in range(50)]
blocks.load(chain[:1], np.empty((1, 65536), np.uint8))
print("ready", flush=True)
for line in sys.stdin:
    if line == "load\\n":
        blocks.load(chain, np.empty((50, 65536), np.uint8))
    else:
        blocks.store([bytes([100 + i]) * 32 for i in range(50)], np.ones((50, 65536), np.uint8))
    print("done", flush=True)
"""


@pytest.fixture
def child(pool, rng):
    """Another client, in a process that can be killed; and the 50 blocks that it loads."""
    blocks, model = random_blocks(rng, 50), f"killed-{os.urandom(4).hex()}"
    keyspace = open_blocks(pool.connect("ucx"), model=model)
    keyspace.store([bytes([i]) * 32 for i in range(50)], blocks)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CLIENT, pool.uri, model], **pipes) as child:
        assert child.stdout.readline() == "ready\n"
        yield child, keyspace, blocks
        child.kill()


def ask(child: subprocess.Popen, what: str) -> None:
    child.stdin.write(f"{what}\n")
    child.stdin.flush()


def test_a_client_killed_in_mid_read_harms_nobody_else(pool, child):
    process, keyspace, blocks = child
    node = helper_of(pool.nodes["n0"].pid)
    helper = helper_of(process.pid)

    with Frozen(node):
        ask(process, "load")
        eventually(lambda: unread_bytes(node))  # what it asks for
        process.kill()
        helper.wait()

    loaded = blank(50)
    # Its UCX process may have ended over it; the node has not, and starts another.
    eventually(lambda: keyspace.load([bytes([i]) * 32 for i in range(50)], loaded).loaded == 50)
    np.testing.assert_array_equal(blocks, loaded)
    assert pool.nodes["n0"].pid in psutil.pids()


def test_a_writer_killed_while_it_is_read_from_leaves_nothing_behind(pool, child):
    process, keyspace, _ = child
    before_bytes = used_bytes(pool, "n0")

    with Frozen(helper_of(process.pid)) as helper:
        ask(process, "store")
        eventually(lambda: used_bytes(pool, "n0") == before_bytes + 50 * BLOCK_BYTES)
        process.kill()
        helper.kill()  # awake again it might still give all its bytes, and they would count
        helper.wait()

    eventually(lambda: used_bytes(pool, "n0") == before_bytes)
    chain = [bytes([100 + i]) * 32 for i in range(50)]
    eventually(lambda: keyspace.store(chain, blank(50)).stored == 50)


@pytest.mark.parametrize("whose", ["node", "client"])
def test_a_ucx_process_that_ends_in_mid_read_costs_no_block_and_is_started_again(pool, rng, whose):
    chain, blocks, loaded = random_chain(50), random_blocks(rng, 50), blank(50)
    client = pool.connect("ucx")
    keyspace = open_blocks(client)
    keyspace.store(chain, blocks)
    keyspace.load(chain[:1], blank(1))
    helpers = {"node": helper_of(pool.nodes["n0"].pid), "client": helper_of(os.getpid())}

    with ThreadPoolExecutor(1) as threads, Frozen(helpers["node"]):
        reading = threads.submit(keyspace.load, chain, loaded, timeout_s=TEST_S_MAX)
        eventually(lambda: not nothing_is_lent())
        helpers[whose].kill()
        assert reading.result().loaded == 50
    np.testing.assert_array_equal(blocks, loaded)

    def is_back() -> bool:
        loaded[:] = 0
        assert keyspace.load(chain, loaded).loaded == 50
        return client.status(reach=True).nodes[0].carrier == "tcp/lo"

    eventually(is_back)
    np.testing.assert_array_equal(blocks, loaded)
    assert client.stats().verify_failures == 0
    eventually(nothing_is_lent)
    eventually(lambda: keyspace.store(random_chain(5), random_blocks(rng, 5)).stored == 5)


def test_ucx_processes_rest_when_nothing_moves_and_end_with_their_parents(pool, rng):
    client = pool.connect("ucx")
    keyspace = open_blocks(client)
    keyspace.store(random_chain(4), random_blocks(rng, 4))
    helpers = [helper_of(pool.nodes["n0"].pid), helper_of(os.getpid())]
    before_s = [sum(helper.cpu_times()[:2]) for helper in helpers]

    signal.sigtimedwait([], 2)  # the time measured over

    used_s = [sum(helper.cpu_times()[:2]) - s for helper, s in zip(helpers, before_s, strict=True)]
    assert max(used_s) < 0.2, "a thread that polls uses all of the 2 s"
    client.close()
    pool.stop(pool.nodes["n0"])
    assert [helper.is_running() for helper in helpers] == [False, False]


def test_what_ucx_has_chosen_is_shown(pool):
    client = pool.connect("ucx")
    (node,) = client.status(reach=True).nodes
    shown = subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", "status", f"--pool={pool.uri}", "--transports=ucx"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        check=True,
    )

    assert (node.transport, node.carrier) == ("ucx", "tcp/lo")
    assert client.stats().fallbacks == 0, "TCP was asked for"
    assert "ucx (tcp/lo)" in shown.stdout


def test_a_fall_to_tcp_that_nobody_asked_for_is_counted(pool, monkeypatch):
    client = pool.connect("ucx")
    monkeypatch.delenv("UCX_TLS")

    client.status(reach=True)

    assert client.stats().fallbacks == 1
