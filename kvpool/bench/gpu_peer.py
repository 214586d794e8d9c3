"""From GPU to GPU: blocks between a `vram` node in another process and a paged cache, next to one plain peer copy.

The node takes the second GPU, or the only one. Two limits are measured in the same run: one plain copy of all bytes
between the two, in turns with ours; and, where NIXL is installed, its own reads of as many blocks, which check nothing.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import numpy as np

import kvpool
from kvpool.bench.gpu_blocks import CACHE_TIMES, CacheBlocks, GpuNoteRow
from kvpool.bench.gpu_nixl import nixl_gbps
from kvpool.bench.measure import GB, compare, percentile, pool_processes, rounded
from kvpool.core.errors import KvpoolError
from kvpool.core.units import format_size
from kvpool.gpu import require_gpu

HEADROOM = 1.3
TIMEOUT_S = 60.0


class _Shape(NamedTuple):
    """What is moved at a time: blocks of some bytes, each in so many pages, and the least GB/s asked for."""

    blocks: int
    block_bytes: int
    layers: int
    target_gbps: float | None
    copy_engine: bool = True

    @property
    def moved_bytes(self) -> int:
        return self.blocks * self.block_bytes


SHAPES = (
    _Shape(256, 2 << 20, 1, 157.0),
    _Shape(256, 2 << 20, 1, None, copy_engine=False),
    _Shape(256, 2 << 20, 32, 157.0),
    _Shape(4096, 64 << 10, 1, 40.0),
    _Shape(4096, 64 << 10, 32, None),
)


class GpuPeerRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="gpu_peer"):
    """Blocks of one shape moved between a node's GPU and ours.

    Attributes:
        what: Which, and between which GPUs.
        gbps: GB/s, from the call to verified bytes.
        limit_gbps: Of one plain copy of as many bytes between the two.
        ratio: The median of the ratios of neighbours.
        moved_gbps: The transfer alone: without look-up, preparing and commit.
        target_gbps: Least GB/s asked for.
    """

    what: str
    gbps: float
    limit_gbps: float
    ratio: float
    moved_gbps: float
    target_gbps: float | None = None


def measure_peers(rounds: int) -> Iterator[GpuPeerRow | GpuNoteRow]:
    """Measure loads and saves of each shape.

    Raises:
        UnavailableError: No CuPy, or no GPU.
        KvpoolError: A transfer failed, or loaded other bytes than were saved.
    """
    cupy = require_gpu()
    theirs = 1 if cupy.cuda.runtime.getDeviceCount() > 1 else 0
    saved_bytes = sum((rounds + 4) * shape.moved_bytes for shape in SHAPES)
    with ExitStack() as stack:
        node_bytes = int(saved_bytes * HEADROOM)
        pool = stack.enter_context(pool_processes(node_bytes, meta_unix=True, device=f"cuda:{theirs}"))
        client = stack.enter_context(kvpool.connect(pool.uri, transports=["cuda"], timeout_s=TIMEOUT_S))
        pids = (os.getpid(), *pool.pids)
        for shape in SHAPES:
            yield from _transfers(cupy, client, pids, shape, theirs, rounds)
    for blocks, block_bytes in dict.fromkeys(shape[:2] for shape in SHAPES):
        gbps = nixl_gbps(blocks, block_bytes, theirs, rounds)
        if gbps is not None:
            what = f"NIXL's own reads of {blocks:,} blocks of {format_size(block_bytes)}, cuda:{theirs}"
            yield GpuNoteRow(what=what, value=gbps, unit="GB/s")


def _transfers(
    cupy: Any,  # noqa: ANN401 - a module that may not be installed
    client: kvpool.Client,
    pids: tuple[int, ...],
    shape: _Shape,
    theirs: int,
    rounds: int,
) -> Iterator[GpuPeerRow]:
    namespace = kvpool.Namespace(model=f"kvpool-bench-{shape.layers}", block_tokens=16, block_bytes=shape.block_bytes)
    memory = cupy.random.default_rng(1).integers(0, 256, CACHE_TIMES * shape.moved_bytes, np.uint8)
    pages = "whole" if shape.layers == 1 else f"in {shape.layers} pages"
    by = "" if shape.copy_engine else ", by kernels"
    name = f"{shape.blocks:,} of {format_size(shape.block_bytes)} {pages}{by}, cuda:{theirs}"
    keyspace = client.namespace(namespace)
    blocks = CacheBlocks(keyspace, memory, shape.blocks, shape.layers, name, copy_engine=shape.copy_engine)
    copy = _PeerCopy(cupy, shape.moved_bytes, theirs)
    blocks.save()
    for what, move, prepare in (
        ("load", blocks.load, blocks.clear),
        ("load after match", blocks.load, blocks.match),
        ("save", blocks.write, blocks.reserve),
    ):
        blocks.moved_s = []

        def limit() -> None:
            blocks.note_moved()  # of the transfer just before
            copy.run()

        compared = compare(move, limit, rounds, pids, prepare)
        yield GpuPeerRow(
            what=f"{what}, {name}",
            gbps=rounded(shape.moved_bytes / GB / percentile(compared.ours_s, 50)),
            limit_gbps=rounded(shape.moved_bytes / GB / percentile(compared.limit_s, 50)),
            ratio=rounded(compared.ratio),
            moved_gbps=rounded(shape.moved_bytes / GB / percentile(blocks.moved_s[1:], 50)),
            target_gbps=shape.target_gbps,
        )
        if move == blocks.load:
            blocks.check()
    blocks.clear()
    blocks.load()
    blocks.check()  # what was saved last


class _PeerCopy:
    """A plain copy between memory of this process on two GPUs, or on one."""

    def __init__(self, cupy: Any, size_bytes: int, theirs: int) -> None:  # noqa: ANN401 - see above
        self._cupy = cupy
        self._theirs = theirs
        self._here = cupy.empty(size_bytes, np.uint8)
        with cupy.cuda.Device(theirs):
            self._there = cupy.zeros(size_bytes, np.uint8)
            cupy.cuda.runtime.deviceSynchronize()
        if theirs:
            if not cupy.cuda.runtime.deviceCanAccessPeer(0, theirs):
                raise KvpoolError(f"cuda:0 cannot reach the memory of cuda:{theirs}; run this where GPUs are linked")
            try:
                cupy.cuda.runtime.deviceEnablePeerAccess(theirs)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise

    def run(self) -> None:
        """Copy, and wait."""
        runtime = self._cupy.cuda.runtime
        ends = (self._here.data.ptr, 0, self._there.data.ptr, self._theirs)
        runtime.memcpyPeerAsync(*ends, self._here.nbytes, 0)
        runtime.streamSynchronize(0)
