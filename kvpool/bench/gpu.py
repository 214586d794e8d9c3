"""GPU memory: blocks between a pool's shared memory and a paged cache on a GPU, next to one plain page-locked copy.

The pool's processes are real, every byte is verified, and each measurement is in turns with its limit. The cache is
four times as large as what is moved, and the blocks lie in it in random order.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash

import kvpool
from kvpool.bench.gpu_blocks import CACHE_TIMES, CacheBlocks, GpuNoteRow
from kvpool.bench.gpu_delay import GpuDelayRow, Products, measure_delay, on_gpu_ms
from kvpool.bench.gpu_peer import GpuPeerRow, measure_peers
from kvpool.bench.measure import GB, compare, elapsed_s, percentile, pool_processes, rounded
from kvpool.core.errors import UnavailableError
from kvpool.gpu import PageRuns, require_gpu

BLOCKS = 256
LAYERS = 32
BLOCK_BYTES = 2 << 20
MOVED_BYTES = BLOCKS * BLOCK_BYTES
CACHE_BYTES = CACHE_TIMES * MOVED_BYTES

LAYER_FIRST = "layer-first"
BLOCK_OUTERMOST = "block-outermost"
TARGETS = {LAYER_FIRST: 0.85, BLOCK_OUTERMOST: 0.9}
DELAY_TARGET_PERCENT = 2.0

HEADROOM = 1.3
PIN_TIMEOUT_S = 120.0
_TO_DEVICE = 1
_TO_HOST = 2
TIMEOUT_S = 60.0
DELAY_PAIRS = 32


class Between(StrEnum):
    """A GPU and what else."""

    HOST = "host"
    GPUS = "gpus"
    ALL = "all"


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        rounds: Times that each transfer is made.
        delay_pairs: Pairs of samples, alone and beside transfers, for the delay of computing; 0: do not measure it.
        between: What is measured.
    """

    rounds: int = 5
    delay_pairs: int = DELAY_PAIRS
    between: Between = Between.ALL


class GpuRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="gpu"):
    """One transfer of 256 blocks of 2 MiB.

    Attributes:
        what: Which.
        gbps: GB/s, from the call to verified bytes.
        limit_gbps: Of one plain copy of as many bytes, page-locked and contiguous on both sides.
        ratio: The median of the ratios of neighbours.
        moved: The same for the transfer alone: from its first copy to the last block verified, without look-up,
            preparing and commit.
        target: Least ratio asked for.
    """

    what: str
    gbps: float
    limit_gbps: float
    ratio: float
    moved: float
    target: float | None = None


Row = GpuRow | GpuDelayRow | GpuNoteRow | GpuPeerRow


def measure_gpu(settings: GpuSettings) -> Iterator[Row]:
    """Measure transfers from GPU to GPU, then those with host memory, what they are made of, and what computing pays.

    Raises:
        UnavailableError: No CuPy, or no GPU.
        KvpoolError: A transfer failed, or loaded other bytes than were saved.
    """
    if settings.between in {Between.GPUS, Between.ALL}:
        yield from measure_peers(settings.rounds)
    if settings.between in {Between.HOST, Between.ALL}:
        yield from _measure_host(settings)


def _measure_host(settings: GpuSettings) -> Iterator[Row]:
    cupy = require_gpu()
    saves = 3 * (settings.rounds + 2) + 4  # what is loaded, a warm-up, rounds; the very first, three for the delays
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_processes(int(saves * MOVED_BYTES * HEADROOM), meta_unix=True))
        client = stack.enter_context(kvpool.connect(pool.uri, transports=["shm"], timeout_s=TIMEOUT_S))
        bench = _Bench(cupy, client, (os.getpid(), *pool.pids), settings.rounds)
        yield _until_page_locked(bench)
        for layout in (LAYER_FIRST, BLOCK_OUTERMOST):
            yield from _transfers(bench, _blocks(bench, layout), TARGETS[layout])
        yield from _transfers(bench, _blocks(bench, LAYER_FIRST, copy_engine=False), None)
        yield _page_by_page(bench)
        yield from _checksums(bench)
        if settings.delay_pairs:
            yield from _delays(bench, settings.delay_pairs)


class _Bench:
    """What all measurements share: a cache's memory, a page-locked buffer, the pool."""

    def __init__(self, cupy: Any, client: kvpool.Client, pids: tuple[int, ...], rounds: int) -> None:  # noqa: ANN401
        self.cupy = cupy
        namespace = kvpool.Namespace(model="kvpool-bench", block_tokens=16, block_bytes=BLOCK_BYTES)
        self.keyspace = client.namespace(namespace)
        self.pids = pids
        self.rounds = rounds
        self.memory = cupy.random.default_rng(1).integers(0, 256, CACHE_BYTES, np.uint8)
        self.buffer = cupy.empty(MOVED_BYTES, np.uint8)
        self.locked = np.frombuffer(cupy.cuda.alloc_pinned_memory(MOVED_BYTES), np.uint8, MOVED_BYTES)
        self.locked[:] = self.memory[:MOVED_BYTES].get()

    def plain(self, kind: int, step_bytes: int = MOVED_BYTES) -> None:
        """Copies of ``step_bytes``, each waited for, between page-locked memory and the GPU."""
        runtime, host, device = self.cupy.cuda.runtime, self.locked.ctypes.data, self.buffer.data.ptr
        for at in range(0, MOVED_BYTES, step_bytes):
            to, source = (device, host) if kind == _TO_DEVICE else (host, device)
            runtime.memcpyAsync(to + at, source + at, step_bytes, kind, 0)
            runtime.streamSynchronize(0)


def _blocks(bench: _Bench, layout: str, *, copy_engine: bool = True) -> CacheBlocks:
    name = layout if copy_engine else f"{layout}, all by kernels"
    layers = LAYERS if layout == LAYER_FIRST else 1
    return CacheBlocks(bench.keyspace, bench.memory, BLOCKS, layers, name, copy_engine=copy_engine)


def _until_page_locked(bench: _Bench) -> GpuNoteRow:
    """A first save and load meet both mappings of the segment."""
    blocks = _blocks(bench, LAYER_FIRST)
    began_s = time.perf_counter()
    blocks.save()
    blocks.load()
    if not blocks.cache.wait_pinned(PIN_TIMEOUT_S):
        raise UnavailableError("the pool's shared memory could not be page-locked; see the warning above")
    return GpuNoteRow(what="until both mappings are page-locked", value=time.perf_counter() - began_s, unit="s")


def _transfers(bench: _Bench, blocks: CacheBlocks, target: float | None) -> Iterator[GpuRow]:
    blocks.save()
    for what, move, prepare, kind in (
        ("load", blocks.load, blocks.clear, _TO_DEVICE),
        ("load after match", blocks.load, blocks.match, _TO_DEVICE),
        ("save", blocks.write, blocks.reserve, _TO_HOST),
    ):
        blocks.moved_s = []

        def limit(kind: int = kind) -> None:
            blocks.note_moved()  # of the transfer just before
            bench.plain(kind)

        compared = compare(move, limit, bench.rounds, bench.pids, prepare)
        moved = [whole / ours for whole, ours in zip(compared.limit_s, blocks.moved_s[1:], strict=True)]
        yield GpuRow(
            what=f"{what}, {blocks.name}",
            gbps=rounded(MOVED_BYTES / GB / percentile(compared.ours_s, 50)),
            limit_gbps=rounded(MOVED_BYTES / GB / percentile(compared.limit_s, 50)),
            ratio=rounded(compared.ratio),
            moved=rounded(percentile(moved, 50)),
            target=target,
        )
        if kind == _TO_DEVICE:
            blocks.check()
    blocks.clear()
    blocks.load()
    blocks.check()  # what was saved last


def _page_by_page(bench: _Bench) -> GpuNoteRow:
    took_s = elapsed_s(partial(bench.plain, _TO_DEVICE, BLOCK_BYTES // LAYERS))
    return GpuNoteRow(what="plain copies of 64 KiB, one at a time", value=MOVED_BYTES / GB / took_s, unit="GB/s")


def _checksums(bench: _Bench) -> Iterator[GpuNoteRow]:
    """What the kernels alone take, and what a processor would."""
    from kvpool.gpu.kernels import Kernels, sums_bytes  # noqa: PLC0415 - needs CuPy

    cupy, page_bytes = bench.cupy, BLOCK_BYTES // LAYERS
    runs = PageRuns(tuple(range(0, BLOCK_BYTES * BLOCKS, page_bytes * BLOCKS)), page_bytes, page_bytes, BLOCKS)
    kernels = Kernels(runs, bench.memory.data.ptr)
    table = cupy.arange(3 * BLOCKS, dtype=np.uint64) % BLOCKS
    ids, seeds, found = (table.data.ptr + row * BLOCKS * table.itemsize for row in range(3))
    scratch = cupy.empty(BLOCKS * (sums_bytes(BLOCK_BYTES) + 64), np.uint8)
    accumulators, sums = scratch.data.ptr, scratch.data.ptr + BLOCKS * 64
    for name, work in (
        ("summed over 512 MiB of pages", lambda: kernels.move("sum", BLOCKS, ids, 0, 0, seeds, sums)),
        ("folded, however many blocks", lambda: kernels.finish(BLOCKS, sums, seeds, accumulators, found)),
        (
            "summed and scattered, the same",
            lambda: kernels.move("scatter", BLOCKS, ids, bench.buffer.data.ptr, 0, seeds, sums),
        ),
    ):
        times_ms = [on_gpu_ms(cupy, work) for _ in range(bench.rounds + 1)]
        yield GpuNoteRow(what=f"checksums on the GPU: {name}", value=percentile(times_ms[1:], 50), unit="ms")
    took_s = elapsed_s(lambda: xxhash.xxh3_64_intdigest(bench.locked.data))
    yield GpuNoteRow(what="xxh3 of the same on one processor", value=took_s * 1e3, unit="ms")


def _copy_out(bench: _Bench, blocks: CacheBlocks) -> None:
    """What a save does on the GPU, into page-locked memory that no pool owns."""
    starts = np.arange(BLOCKS, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    blocks.cache.blocks(blocks.sources).begin_store(bench.locked, starts, lambda: [0] * BLOCKS, lasting=False)()


def _delays(bench: _Bench, pairs: int) -> Iterator[GpuDelayRow]:
    products = Products(bench.cupy)
    for layout, copy_engine in ((LAYER_FIRST, True), (BLOCK_OUTERMOST, True), (LAYER_FIRST, False)):
        blocks = _blocks(bench, layout, copy_engine=copy_engine)
        blocks.save()
        target = DELAY_TARGET_PERCENT if copy_engine else None
        yield measure_delay(products, f"load, {blocks.name}", (blocks.load, MOVED_BYTES), pairs, target)
    blocks = _blocks(bench, LAYER_FIRST)
    yield measure_delay(
        products, f"save, {blocks.name}", (partial(_copy_out, bench, blocks), MOVED_BYTES), pairs, DELAY_TARGET_PERCENT
    )
    yield measure_delay(products, "nothing", (partial(time.sleep, 0.01), 0), pairs, None)
