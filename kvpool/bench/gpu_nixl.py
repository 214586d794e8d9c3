"""NIXL's own reads of blocks from one GPU to another, between two processes: nothing is looked up, and nothing checked.

Both are children of the benchmark: UCX may end the process that it runs in.
"""

import contextlib
import os
import statistics
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

from kvpool.bench.measure import GB, child, heard, rounded, say
from kvpool.core.errors import KvpoolError, SettingsError
from kvpool.gpu import require_gpu
from kvpool.transport.ucx.nixl import require_nixl

TRANSFER_TIMEOUT_S = 10.0


def nixl_gbps(blocks: int, block_bytes: int, theirs: int, rounds: int) -> float | None:
    """GB/s of reads of all blocks, in one request each time; None where NIXL is not installed or fails.

    Args:
        blocks: Blocks of one read.
        block_bytes: Length of each.
        theirs: The GPU that is read from; it is read to the first one.
        rounds: Reads that count.
    """
    try:
        require_nixl()
        with (
            child(serve, blocks, block_bytes, theirs) as server,
            child(read, blocks, block_bytes, heard(server), rounds) as reader,
        ):
            return rounded(float(heard(reader)))
    except (SettingsError, KvpoolError, ValueError):
        return None


def serve(blocks: int, block_bytes: int, theirs: int) -> None:
    """In a child: let a GPU's memory be read until stdin ends; says how first."""
    memory = _Memory(theirs, blocks * block_bytes)
    described = memory.agent.getLocalPartialMD(memory.registered, inc_conn_info=True, backends=[memory.backend])
    say(f"{bytes(described).hex()}:{memory.address}:{theirs}")
    sys.stdin.read()
    os._exit(0)


def read(blocks: int, block_bytes: int, described: str, rounds: int) -> None:
    """In a child: read all blocks several times, in random order; says GB/s of the median."""
    hexed, address, theirs = described.split(":")
    memory = _Memory(0, blocks * block_bytes)
    name = memory.agent.loadRemoteMD(bytes.fromhex(hexed))
    name = name.decode() if isinstance(name, bytes) else name
    ours = memory.described(memory.nixl.NIXL_INIT_AGENT, memory.address, 0, blocks, block_bytes)
    remote = memory.described(name, int(address), int(theirs), blocks, block_bytes)
    order = np.random.default_rng(3).permutation(blocks).astype(np.int32)
    request = (memory.nixl.NIXL_READ, ours, order, remote, order[::-1].copy(), "", [memory.backend], False)
    times_s = []
    for _ in range(rounds + 1):
        handle = memory.agent.makeXferReq(*request)
        began_s = time.perf_counter()
        state = memory.agent.postXferReq(handle, "")
        while state == memory.nixl.NIXL_IN_PROG and time.perf_counter() - began_s < TRANSFER_TIMEOUT_S:
            state = memory.agent.getXferStatus(handle)
        times_s.append(time.perf_counter() - began_s)
        if state != memory.nixl.NIXL_SUCCESS:
            os._exit(1)
        memory.agent.releaseXferReq(handle)
    say(blocks * block_bytes / GB / statistics.median(times_s[1:]))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)


class _Memory:
    """Memory of one GPU, registered with a NIXL agent of this process."""

    def __init__(self, device: int, size_bytes: int) -> None:
        cupy = require_gpu()
        cupy.cuda.Device(device).use()
        self.address: int = cupy.cuda.runtime.malloc(size_bytes)
        cupy.cuda.runtime.memset(self.address, 0, size_bytes)
        cupy.cuda.runtime.deviceSynchronize()
        self.nixl: Any = import_module(f"{require_nixl()}._bindings")
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = True
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_RW
        self.agent = self.nixl.nixlAgent(f"kvpool-bench-{os.getpid()}", config)
        self.backend = self.agent.createBackend("UCX", {})
        self.registered = self.nixl.nixlRegDList(self.nixl.VRAM_SEG, [(self.address, size_bytes, device, "")])
        self.agent.registerMem(self.registered, [self.backend])

    def described(self, name: str, address: int, device: int, blocks: int, block_bytes: int) -> int:
        """A handle for ``blocks`` blocks side by side at ``address`` of agent ``name``."""
        strided = np.array([[address, block_bytes, device, block_bytes, blocks]], np.uint64)
        return int(self.agent.prepXferDlist(name, self.nixl.VRAM_SEG, strided, [self.backend]))
