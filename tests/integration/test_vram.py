"""Blocks in a device's memory, with real nodes; host memory plays the device (`tests.host_device`)."""

import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.client.loading import _Load
from kvpool.client.locating import locate
from kvpool.core.directory import MissReason
from kvpool.core.limits import PAGE_BYTES
from kvpool.transport import devices
from kvpool.transport.cuda import MapReply, MapRequest
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.connection import Connection
from tests.host_device import BLOCK_BYTES, BROKEN, Device
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain
from tests.integration.test_corruption import run_verify
from tests.integration.test_disk import kvpool_status
from tests.integration.test_replicas import kvpool_drain
from tests.waiting import eventually

TRANSPORTS = ["cuda", "shm", "unix", "tcp"]
BLOCKS = 8
NO_SCRUB = {"scrub-bytes-per-s": 0}


def start_node(pool: Pool, blocks: int = 2 * BLOCKS, name: str = "n0", **options: object) -> None:
    vram = f"{blocks * BLOCK_BYTES}B"
    pool.start_node(name, **{"vram": vram, "device": "host:0", **NO_SCRUB, **options})


@pytest.fixture
def pool(start_pool):
    """A small node of the test's own that holds its blocks in a device."""
    pool = start_pool(nodes=0, **{"expected-nodes": 1})
    pool.module = "tests.host_device"
    start_node(pool)
    return pool


@pytest.fixture(scope="module")
def lasting_pool(tmp_path_factory):
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("pool"), stack, module="tests.host_device")
        pool.start_meta(**{"expected-nodes": 1})
        start_node(pool, 1024)
        yield pool


@pytest.fixture
def shared(lasting_pool):
    """A node that tests share: they use namespaces of their own and break nothing."""
    with ExitStack() as stack:
        yield replace(lasting_pool, stack=stack)


@pytest.fixture
def device(rng):
    device = Device(64)
    device.memory[:] = rng.integers(0, 256, device.memory.shape, np.uint8)
    return device


def segment_of(client: kvpool.Client) -> np.ndarray:
    """The node's memory, as this client has it mapped."""
    [(_, transport)] = client._nodes._transports.items()
    return transport._memory.payload


def place_of(segment: np.ndarray, block: np.ndarray) -> int:
    return segment.tobytes().index(block.tobytes())


def status_of(client: kvpool.Client):
    return client.status().nodes[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_brings_the_same_bytes(shared, device, rng, transport):
    """From a device's memory and from the host's, to either."""
    client = shared.connect(transport)
    keyspace, chain = open_blocks(client, BLOCK_BYTES), random_chain(BLOCKS)
    right, loaded = device.memory[:BLOCKS].copy(), blank(BLOCKS, BLOCK_BYTES)

    assert keyspace.store(chain, device.blocks(range(BLOCKS))).stored == BLOCKS
    assert keyspace.load(chain, device.blocks(range(40, 40 + BLOCKS))).loaded == BLOCKS
    assert keyspace.load(chain, loaded).loaded == BLOCKS
    np.testing.assert_array_equal(right, device.memory[40 : 40 + BLOCKS])
    np.testing.assert_array_equal(right, loaded)

    names, blocks = random_chain(BLOCKS), random_blocks(rng, BLOCKS, BLOCK_BYTES)
    assert keyspace.store(names, list(blocks)).stored == BLOCKS
    assert keyspace.load(names, device.blocks(range(50, 50 + BLOCKS))).loaded == BLOCKS
    np.testing.assert_array_equal(blocks, device.memory[50 : 50 + BLOCKS])
    assert client.stats().loaded_bytes == {transport: 3 * blocks.nbytes}
    assert client.stats().verify_failures == 0


def test_blocks_of_any_length_keep_to_their_slots(shared, rng):
    """Also those that end within a page."""
    client = shared.connect("tcp")
    for length in (100, PAGE_BYTES - 1, PAGE_BYTES + 1, 5 * PAGE_BYTES + 17):
        keyspace, chain = open_blocks(client, length), random_chain(3)
        blocks, loaded = random_blocks(rng, 3, length), blank(3, length)
        assert keyspace.store(chain, list(blocks)).stored == 3
        assert keyspace.load(chain, list(loaded)).loaded == 3
        np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_oldest_make_room_when_the_device_is_full(pool, device, transport):
    keyspace = open_blocks(client := pool.connect(transport), BLOCK_BYTES)
    chains = [random_chain(BLOCKS) for _ in range(4)]
    for chain in chains:
        assert keyspace.store(chain, device.blocks(range(BLOCKS))).stored == BLOCKS

    assert [keyspace.match(chain).blocks for chain in chains] == [0, 0, BLOCKS, BLOCKS]
    assert status_of(client).used_bytes == 2 * BLOCKS * BLOCK_BYTES
    assert keyspace.load(chains[3], device.blocks(range(40, 40 + BLOCKS))).loaded == BLOCKS
    np.testing.assert_array_equal(device.memory[:BLOCKS], device.memory[40 : 40 + BLOCKS])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slot_that_changes_hands_before_it_is_read_is_a_miss(pool, device, rng, transport):
    keyspace, chain = open_blocks(pool.connect(transport), BLOCK_BYTES), random_chain(BLOCKS)
    keyspace.store(chain, device.blocks(range(BLOCKS)))
    deadline, packed = Deadline(10), b"".join(chain)
    located = locate(keyspace, packed, 0, range(BLOCKS), 0, deadline)
    for _ in range(4):
        assert keyspace.store(random_chain(BLOCKS), list(random_blocks(rng, BLOCKS, BLOCK_BYTES))).stored == BLOCKS

    load = _Load(keyspace, packed, device.blocks(range(40, 40 + BLOCKS)), 0, deadline)
    load.begin(located)
    reasons = load.end()

    expected = MissReason.VERIFY_FAILED if transport == "cuda" else MissReason.EVICTED
    assert reasons == [expected] * BLOCKS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bit_that_flips_in_the_device_is_refused_by_its_reader(shared, device, transport):
    keyspace, chain = open_blocks(shared.connect(transport), BLOCK_BYTES), random_chain(BLOCKS)
    mapping = shared.connect("cuda")
    keyspace.store(chain, device.blocks(range(BLOCKS)))
    open_blocks(mapping, BLOCK_BYTES, model=keyspace.namespace.model).load(chain, device.blocks(range(40, 48)))
    segment = segment_of(mapping)
    segment[place_of(segment, device.memory[3]) + 77] ^= 4

    result = keyspace.load(chain, device.blocks(range(50, 58)))

    assert result.reasons[3] == MissReason.VERIFY_FAILED
    assert [reason for i, reason in enumerate(result.reasons) if i != 3] == [None] * (BLOCKS - 1)
    eventually(lambda: keyspace.match(chain).blocks == 3)


def test_verify_and_the_scrub_look_at_the_device_itself(pool, device):
    keyspace, chain = open_blocks(client := pool.connect("cuda"), BLOCK_BYTES), random_chain(BLOCKS)
    keyspace.store(chain, device.blocks(range(BLOCKS)))
    code, records, _ = run_verify(pool)
    assert (code, records["n0"]["blocks"], records["n0"]["bad"]) == (0, BLOCKS, 0)
    segment = segment_of(client)
    segment[place_of(segment, device.memory[5])] ^= 1

    code, records, _ = run_verify(pool)

    assert (code, records["n0"]["bad"]) == (1, 1)
    eventually(lambda: keyspace.match(chain).blocks == 5)
    eventually(lambda: status_of(client).scrub.retired_bytes == BLOCK_BYTES)


@pytest.mark.parametrize("transport", ["cuda", "tcp"])
@pytest.mark.parametrize("end", [Pool.kill, Pool.stop], ids=["killed", "stopped"])
def test_the_next_start_is_empty_and_says_so(pool, device, transport, end):
    """A device's memory does not outlive its process; what was in it is not announced, and the pool goes on."""
    keyspace, chain = open_blocks(client := pool.connect(transport), BLOCK_BYTES), random_chain(BLOCKS)
    keyspace.store(chain, device.blocks(range(BLOCKS)))
    first = status_of(client).segments[0].segment_id

    end(pool, pool.nodes["n0"])
    start_node(pool)

    eventually(lambda: status_of(client).state == "ready" and keyspace.match(chain).reason == MissReason.NODE_DOWN)
    assert (status_of(client).blocks, keyspace.load(chain, device.blocks(range(BLOCKS))).loaded) == (0, 0)
    assert status_of(client).segments[0].segment_id != first
    assert ("blocks_lost" in (pool.directory / "n0.log").read_text()) == (end is Pool.kill)
    assert keyspace.store(chain, device.blocks(range(BLOCKS))).stored == BLOCKS
    assert keyspace.load(chain, device.blocks(range(40, 48))).loaded == BLOCKS
    np.testing.assert_array_equal(device.memory[:BLOCKS], device.memory[40:48])


@pytest.mark.parametrize("transport", ["cuda", "tcp"])
def test_a_node_that_is_killed_while_it_is_read_costs_misses_alone(pool, device, transport):
    keyspace, chain = open_blocks(pool.connect(transport), BLOCK_BYTES), random_chain(BLOCKS)
    right = device.memory[:BLOCKS].copy()
    keyspace.store(chain, device.blocks(range(BLOCKS)))
    loads, wrong = [], []

    def read():
        while not loads or loads[-1]:
            device.memory[40:48] = 0
            result = keyspace.load(chain, device.blocks(range(40, 48)))
            good = [i for i, reason in enumerate(result.reasons) if reason is None]
            wrong.extend(i for i in good if not np.array_equal(device.memory[40 + i], right[i]))
            loads.append(result.loaded)

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: len(loads) > 5)
    pool.kill(pool.nodes["n0"])
    thread.join()

    assert not wrong
    assert loads[0] == BLOCKS


def test_slots_of_a_writer_that_dies_are_given_to_others(pool, device):
    """It has mapped the memory, and prepared all of it."""
    code = (
        "import os, sys, kvpool; from tests.host_device import Device, DeviceBlocks, BLOCK_BYTES\n"
        "class Dies(DeviceBlocks):\n"
        "    def begin_store(self, *args, **options): os.kill(os.getpid(), 9)\n"
        "    def select(self, blocks): return Dies(self.device, [self.ids[b] for b in blocks])\n"
        "keyspace = kvpool.connect(sys.argv[1], transports=['cuda']).namespace("
        "kvpool.Namespace(model='dies', block_tokens=16, block_bytes=BLOCK_BYTES))\n"
        "keyspace.store([os.urandom(32) for _ in range(16)], Dies(Device(16), list(range(16))))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, pool.uri], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL

    keyspace = open_blocks(pool.connect("cuda"), BLOCK_BYTES)
    eventually(lambda: keyspace.store(random_chain(16), device.blocks(range(16))).stored == 16)


def test_a_device_that_fails_is_turned_off_and_shown(start_pool, device, tmp_path, monkeypatch):
    monkeypatch.setenv(BROKEN, str(tmp_path / "broken"))
    pool = start_pool(nodes=0, **{"expected-nodes": 1})
    pool.module = "tests.host_device"
    start_node(pool)
    keyspace, chain = open_blocks(pool.connect("tcp"), BLOCK_BYTES), random_chain(BLOCKS)
    keyspace.store(chain, device.blocks(range(BLOCKS)))

    (tmp_path / "broken").touch()

    assert keyspace.load(chain, device.blocks(range(40, 48))).loaded == 0
    eventually(lambda: keyspace.match(chain).blocks == 0)
    assert keyspace.store(random_chain(2), device.blocks(range(2))).stored == 0
    code, shown = kvpool_status(pool)
    assert code == 4
    assert "turned off: vram of n0 (read: the device has fallen off the bus)" in " ".join(shown.split())
    assert (pool.directory / "n0.log").read_text().count("medium_off") == 1


def test_blocks_go_to_disk_below_the_device_and_come_back(pool, device, tmp_path):
    pool.stop(pool.nodes["n0"])
    start_node(pool, disk=tmp_path, **{"disk-size": f"{8 * BLOCKS * BLOCK_BYTES}B"})
    keyspace, chain = open_blocks(client := pool.connect("cuda"), BLOCK_BYTES), random_chain(BLOCKS)
    keyspace.store(chain, device.blocks(range(BLOCKS)))
    keyspace.load(chain, device.blocks(range(40, 48)))
    keyspace.store(random_chain(BLOCKS), device.blocks(range(8, 16)))
    eventually(lambda: client.status().counters["demoted_blocks"] == BLOCKS)
    keyspace.store(random_chain(BLOCKS), device.blocks(range(16, 24)))

    assert keyspace.load(chain, device.blocks(range(50, 58))).loaded == BLOCKS

    np.testing.assert_array_equal(device.memory[:BLOCKS], device.memory[50:58])
    assert client.stats().loaded_bytes["disk"] == BLOCKS * BLOCK_BYTES
    eventually(lambda: client.status().counters["promoted_blocks"] == BLOCKS)


def test_a_drain_takes_blocks_to_shared_memory_and_to_another_device(pool, device):
    keyspace, chain = open_blocks(client := pool.connect("tcp"), BLOCK_BYTES), random_chain(BLOCKS)
    keyspace.store(chain, device.blocks(range(BLOCKS)))
    pool.start_node("n1", size=f"{BLOCKS * BLOCK_BYTES}B", **NO_SCRUB)
    assert kvpool_drain(pool, "n0").returncode == 0
    start_node(pool, name="n2")
    assert kvpool_drain(pool, "n1").returncode == 0

    assert [node.node_id for node in client.status().nodes if node.blocks] == ["n2"]
    assert keyspace.load(chain, device.blocks(range(40, 48))).loaded == BLOCKS
    np.testing.assert_array_equal(device.memory[:BLOCKS], device.memory[40:48])


def test_a_client_that_cannot_map_the_device_takes_the_next_transport(shared, device, monkeypatch):
    monkeypatch.delitem(devices.KINDS, "host")
    client = shared.stack.enter_context(kvpool.connect(shared.uri, transports=["cuda", "shm"]))
    keyspace, chain = open_blocks(client, BLOCK_BYTES), random_chain(BLOCKS)

    assert keyspace.store(chain, device.blocks(range(BLOCKS))).stored == BLOCKS
    assert keyspace.load(chain, device.blocks(range(40, 48))).loaded == BLOCKS
    assert client.stats().loaded_bytes == {"shm": BLOCKS * BLOCK_BYTES}


def test_who_may_map_a_device(shared, long_lived_pool):
    """Whoever may open the node's Unix socket; nobody over TCP, and nothing of a node without a device."""
    for ready, uri, error in (
        (shared.ready["n0"], "data", "over the node's Unix socket only"),
        (long_lived_pool.ready["n0"], "unix", "has no GPU memory"),
    ):
        where = ready[uri] if uri == "data" else f"unix://{ready[uri]}"
        connection = Connection(where, "me", 5)
        with pytest.raises(kvpool.UsageError, match=error):
            connection.call(MapRequest(), MapReply, 5)
        connection.close()
    assert not Path(shared.ready["n0"]["unix"]).stat().st_mode & 0o077


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"vram": "1TiB", "device": "host:0"}, "choose a smaller --vram or another --device"),
        ({"vram": "1MiB", "device": "host:7"}, "choose a smaller --vram or another --device"),
        ({"vram": "1MiB", "device": "rocm:0"}, "device 'rocm:0' is not known; write e.g. cuda:0"),
        ({"vram": "1MiB", "device": "gpu"}, "device"),
        ({"vram": "100B"}, "must hold at least one page"),
        ({"vram": "1MiB", "ucx": True}, "leave ucx out, or vram"),
        ({"vram": "1MiB", "device": "cuda:0"}, "pip install 'kvpool[cuda13]'"),
    ],
)
def test_a_device_that_cannot_be_is_refused_with_what_to_do(shared, options, error):
    given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    where = ["--node-id=n1", f"--meta={shared.uri}", f"--segment-dir={shared.directory}"]
    where += ["--data-port=0", "--grpc-port=0", f"--unix-socket={shared.directory}/n1.sock"]
    command = [sys.executable, "-m", "tests.host_device", "node", *where, *given]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode in {1, 2, 3}
    assert error in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert not list(shared.directory.glob("kvpool-n1.*"))
