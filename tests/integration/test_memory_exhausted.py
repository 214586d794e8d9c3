"""Services that have no more memory: they refuse with a typed error, stay alive, and their accounts are right after it.

Row 15 of the fault matrix. The limit is the address space that the process has already, and a little.
"""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import kvpool
from kvpool.core.limits import FRAME_BODY_BYTES_MAX
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import DiscardRequest, Done, Ping
from tests.integration.conftest import random_chain

LEFT_BYTES = 1 << 20
"""Less than a frame's body may have, or a thread's stack takes; more than small answers need."""

LARGE = DiscardRequest(b"", bytes(FRAME_BODY_BYTES_MAX - 64), b"")
"""Takes more than is left, before anybody has looked at it."""


@contextmanager
def without_memory(pid: int) -> Iterator[None]:
    limit = psutil.Process(pid).memory_info().vms + LEFT_BYTES
    before = resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


def refused_connections(uri: str) -> int:
    """How many of some further connections a server without memory does not take."""
    refused = 0
    with ExitStack() as stack:
        for _ in range(20):
            try:
                stack.callback(Connection(uri, "one more", 5.0).close)
            except kvpool.UnavailableError:
                refused += 1
    return refused


@pytest.mark.parametrize("role", ["node", "meta"])
def test_a_service_without_memory_refuses_and_lives(fault_pool, role):
    pool = fault_pool
    kept = pool.put_on("n0", 3)
    process = pool.nodes["n0"] if role == "node" else pool.meta
    uri = f"unix://{pool.directory}/n0.sock" if role == "node" else pool.meta_ready["framed"]
    asked, other = Connection(uri, "asks", 5.0), Connection(uri, "asks little", 5.0)

    with without_memory(process.pid):
        with pytest.raises(kvpool.CapacityError, match="no memory"):
            asked.call(LARGE, Done, 5.0)
        assert [c.call(Ping(), Done, 5.0) for c in (asked, other)] == [Done(0)] * 2
        assert refused_connections(uri) > 0
        for _ in range(10):
            with suppress(kvpool.UnavailableError):
                pool.put(random_chain(8))
            pool.get(kept)

    asked.close()
    other.close()
    Connection(uri, "later", 5.0).close()
    pool.put_again(kept)
    pool.settle()


@pytest.fixture
def tiny_memory(tmp_path) -> Iterator[Path]:
    """A shared memory file system of 1 MiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("size", ["2MiB", "1MiB"], ids=["payload", "headers"])
def test_shared_memory_too_small_is_an_error_at_the_start_with_the_fix(fault_pool, tiny_memory, size):
    options = ("--data-port=0", "--grpc-port=0", f"--unix-socket={tiny_memory}.sock", f"--segment-dir={tiny_memory}")
    command = [sys.executable, "-m", "kvpool.cli.main", "node", f"--meta={fault_pool.uri}", "--node-id=tiny"]

    ended = subprocess.run([*command, f"--size={size}", *options], capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    said = " ".join(ended.stderr.split())
    assert f"{size.replace('MiB', ' MiB')} with" in said
    assert "choose a smaller --size or enlarge it" in said
    assert [path for path in tiny_memory.iterdir() if path.suffix != ".lock"] == []
    fault_pool.settle()
