"""The raw limit of `ucx`: NIXL reads the same blocks out of a child's memory, one request a stream, and checks nothing.

It is what both operations are compared with: a put, too, is a read, by the node.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from kvpool.bench.limits import Batch, Block, share_out, shared_memory
from kvpool.bench.measure import child, heard, say
from kvpool.core.errors import UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.transport.ucx.messages import Region
from kvpool.transport.ucx.nixl import Agent

DEVICES = "lo"


class UcxLimit:
    """Reads batches into the caller's registered memory; see `Limit`.

    Args:
        agent: Has ``memory`` as its region.
        peer: The child's number.
        memory: What the batches' buffers lie in.
        block_bytes: Length of each.
        streams: Requests of one batch side by side.
        threads: How many may call.
    """

    def __init__(self, agent: Agent, peer: int, memory: Block, block_bytes: int, streams: int, threads: int) -> None:
        self._agent = agent
        self._peer = peer
        self._memory = memory
        self._pages_each = block_bytes // PAGE_BYTES
        self._streams = streams
        self._workers = ThreadPoolExecutor(threads * streams, "limit-ucx")

    def move(self, batch: Batch) -> None:
        """See `Limit.move`."""
        share_out(self._workers, len(batch.buffers), self._streams, partial(self._read, batch))

    def close(self) -> None:
        """End its threads."""
        self._workers.shutdown()

    def _read(self, batch: Batch, start: int, end: int) -> None:
        base = self._memory.ctypes.data
        ours = np.array([(b.ctypes.data - base) // PAGE_BYTES for b in batch.buffers[start:end]], np.uint32)
        theirs = np.arange(batch.first + start, batch.first + end, dtype=np.uint32) * np.uint32(self._pages_each)
        self._agent.read(self._peer, self._pages_each, ours, theirs)


@contextlib.contextmanager
def ucx_limit(memory: Block, block_bytes: int, threads: int, streams: int) -> Iterator[UcxLimit]:
    """A `UcxLimit`, and the child that it reads from; raises UsageError for blocks that are no whole pages."""
    if block_bytes % PAGE_BYTES:
        raise UsageError(f"block_bytes is {block_bytes}; the raw limit of ucx moves whole pages of {PAGE_BYTES}")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(child(serve_memory, memory.nbytes))
        agent, address = heard(server).split()
        limit_agent = Agent(f"bench-{os.getpid()}", memory, memory, DEVICES)
        peer = limit_agent.add_peer(Region(bytes.fromhex(agent), int(address), memory.nbytes))
        limit = UcxLimit(limit_agent, peer, memory, block_bytes, streams, threads)
        stack.callback(limit.close)
        yield limit


def serve_memory(size_bytes: int) -> None:
    """In a child: let memory be read until stdin ends; says how first."""
    memory = shared_memory(size_bytes)
    agent = Agent(f"bench-served-{os.getpid()}", memory, memory, DEVICES)
    say(f"{agent.region.agent.hex()} {agent.region.address}")
    sys.stdin.read()
    os._exit(0)


def children_of(pids: Sequence[int]) -> tuple[int, ...]:
    """Processes that these have started and that still run: the UCX processes work for them."""
    found: list[int] = []
    for pid in pids:
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return tuple(found)
