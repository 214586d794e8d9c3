"""What UCX is told, and what it does not find: pools work on without it, and say what to change."""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import psutil
import pytest

import kvpool
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain

WRONG = [
    ({"UCX_NET_DEVICES": "mlx5_9:1"}, r"'mlx5_9:1' of UCX_NET_DEVICES='mlx5_9:1'; use one or more of .*'lo'\(tcp\)"),
    ({"UCX_TLS": "rc_mlx5"}, r"'rc_mlx5' of UCX_TLS='rc_mlx5'; use one or more of .*\btcp\b"),
    ({"UCX_TLS": "self"}, r"UCX does not work with UCX_TLS='self': no active messages transport"),
]
"""What no host without RDMA has; and what is said of it."""


def other_device() -> str:
    """A network device that is not loopback."""
    addresses = psutil.net_if_addrs()
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"]
    found = [name for name in up if any(address.family == socket.AF_INET for address in addresses[name])]
    return found[0] if found else pytest.skip("this host has loopback alone")


@pytest.fixture(scope="module")
def ucx_pool(tmp_path_factory):
    """A pool whose node serves UCX over TCP; tests do not break it."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta(**{"expected-nodes": 1})
        pool.start_node("n0", "32MiB", ucx=True)
        yield pool


@pytest.fixture(params=WRONG, ids=lambda wrong: " ".join(wrong[0]))
def wrong(request, monkeypatch):
    environ, said = request.param
    monkeypatch.delenv("UCX_TLS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return said


def test_what_ucx_does_not_find_is_an_error_that_names_it_and_what_is_there(ucx_pool, wrong):
    with pytest.raises(kvpool.UnavailableError, match=wrong):
        kvpool.connect(ucx_pool.uri, transports=["ucx"])


def test_without_ucx_the_next_transport_carries_everything_and_that_is_counted(ucx_pool, wrong, rng, caplog):
    chain, blocks, loaded = random_chain(20), random_blocks(rng, 20), blank(20)

    with kvpool.connect(ucx_pool.uri, transports=["ucx", "tcp"]) as client:
        keyspace = open_blocks(client)
        assert keyspace.store(chain, blocks).stored == 20
        assert keyspace.load(chain, loaded).loaded == 20
        stats = client.stats()
        (node,) = client.status(reach=True).nodes

    np.testing.assert_array_equal(blocks, loaded)
    assert stats.loaded_bytes == {"tcp": blocks.nbytes}
    assert stats.fallbacks == 1
    assert node.transport == "tcp"
    assert any(record.levelname == "WARNING" and "cannot be used" in record.message for record in caplog.records)


def test_a_node_that_is_to_serve_ucx_and_cannot_does_not_start(ucx_pool, wrong):
    with pytest.raises(kvpool.UnavailableError, match="cannot be served over UCX") as raised:
        ucx_pool.start_node("n1", "8MiB", ucx=True)

    raised.match(wrong)
    raised.match("start the node without --ucx")


def test_a_writer_that_ucx_does_not_reach_uses_frames_and_loses_nothing(ucx_pool, rng, monkeypatch):
    # No device is common to both sides: both start, and have no way to each other.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", other_device())
    chain, blocks, loaded = random_chain(20), random_blocks(rng, 20), blank(20)
    with kvpool.connect(ucx_pool.uri, transports=["ucx"]) as client:
        keyspace = open_blocks(client)

        assert keyspace.store(chain, blocks).stored == 20
        assert keyspace.load(chain, loaded).loaded == 20
        (node,) = client.status(reach=True).nodes

        np.testing.assert_array_equal(blocks, loaded)
        assert (node.transport, node.carrier) == ("ucx", "frames")
        assert client.stats().fallbacks == 1


def test_a_pool_of_one_process_serves_ucx_too(place, monkeypatch, rng):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    chain, blocks, loaded = random_chain(20), random_blocks(rng, 20), blank(20)
    socket_path = place.segments / "up.sock"
    options = ["--ucx", "--size=8MiB", f"--unix-socket={socket_path}", "--format=json"]
    ports = ["--grpc-port=0", "--framed-port=0", "--data-port=0"]
    command = [sys.executable, "-m", "kvpool.cli.main", "up", *options, *ports]
    environ = place.environ | {"UCX_TLS": "tcp,self"}

    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as up:
        ready = json.loads(up.stdout.readline())
        with kvpool.connect(ready["uri"], transports=["ucx", "tcp"]) as client:
            keyspace = open_blocks(client)
            assert keyspace.store(chain, blocks).stored == 20
            assert keyspace.load(chain, loaded).loaded == 20
            assert client.stats().loaded_bytes == {"ucx": blocks.nbytes}
        up.terminate()
        assert up.wait() == 0

    assert ready["transports"] == ["shm", "ucx", "unix", "tcp"]
    np.testing.assert_array_equal(blocks, loaded)
    place.assert_clean()


REFUSED = """
import mmap, os, sys, numpy as np
from kvpool.transport.ucx.nixl import Agent
descriptor = os.memfd_create("memory")
os.ftruncate(descriptor, 1 << 20)
local = np.frombuffer(mmap.mmap(descriptor, 1 << 20), np.uint8)
exported = np.frombuffer(mmap.mmap(descriptor, 1 << 20, prot=mmap.PROT_READ), np.uint8)
local[:] = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
register, said = Agent._register, str
if sys.argv[1] == "loud":
    def refuse(agent, memory):
        if not memory.flags.writeable:
            raise RuntimeError("NIXL_ERR_BACKEND")
        return register(agent, memory)
    Agent._register = refuse
elif sys.argv[1] == "quiet":
    said = lambda: "ucp_mm.c:82 UCX  DIAG  failed to register address 0x7f0 (host) length 1048576 on md[2]=mlx5_0"
node = Agent("node", exported, local, "lo", said)
assert node.region.address == (exported if sys.argv[1] == "taken" else local).ctypes.data
mine = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
reader = Agent("reader", mine, mine, "lo")
reader.read(reader.add_peer(node.region), 256, np.array([0], np.uint32), np.array([0], np.uint32))
assert np.array_equal(mine, local)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["taken", "loud", "quiet"])
def test_memory_that_a_device_takes_only_if_it_can_be_written_is_shown_that_way(how, monkeypatch):
    # No device here refuses any: what NIXL, or UCX's log, would say of one is said in its stead.
    monkeypatch.setenv("UCX_TLS", "tcp,self")

    done = subprocess.run([sys.executable, "-c", REFUSED, how], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert ("registered_writable" in done.stdout + done.stderr) == (how != "taken")
