"""Launching the kernels of `kernels.cu`, compiled for one cache's layout when it is opened (0.1 to 0.7 s)."""

from importlib.resources import files

import cupy
import numpy as np

from kvpool.gpu.layout import PageRuns

MOVE_THREADS = 512
"""A thread block on each multiprocessor reads at 3.1 TB/s with so many threads; the fewest that come near the limit."""

FETCH_THREADS = 128
FOLD_THREADS = 32
KIB_SUM_BYTES = 64
"""What is summed of each KiB: eight accumulators."""


def sums_bytes(block_bytes: int) -> int:
    """Bytes of one block's sums."""
    return -(-block_bytes // 1024) * KIB_SUM_BYTES


class Kernels:
    """The kernels for blocks of one cache. Launches go to the current stream, and return at once.

    Args:
        runs: The cache's layout, checked.
        address: Of the cache, on the current device.
    """

    def __init__(self, runs: PageRuns, address: int) -> None:
        source = files("kvpool.gpu").joinpath("kernels.cu").read_text()
        options = ("-std=c++17", f"-DPAGE_BYTES={runs.size_bytes}ull", f"-DBLOCK_BYTES={runs.block_bytes}ull")
        module = cupy.RawModule(code=source, options=options)
        self._moves = {name: module.get_function(name) for name in ("scatter", "gather", "pull", "push", "sum")}
        self._fetch = module.get_function("fetch")
        self._fold = module.get_function("fold")
        self._merge = module.get_function("merge")
        offsets = cupy.asarray(np.array(runs.offsets, np.uint64))
        self._cache = (np.uint64(address), offsets, np.uint64(runs.stride))
        self._work = 4 * -(-runs.block_bytes // 1024)
        self._multiprocessors: int = cupy.cuda.Device().attributes["MultiProcessorCount"]

    def move(self, name: str, blocks: int, ids: int, packed: int, places: int, seeds: int, sums: int) -> None:
        """``scatter``, ``gather``, ``pull``, ``push`` or ``sum`` blocks.

        All but the first two arguments are addresses on the GPU; only ``pull`` and ``push`` look at ``places``.
        """
        grid = min(self._multiprocessors, -(-blocks * self._work // MOVE_THREADS))
        where = (*map(np.uint64, (ids, packed, places, seeds, sums, blocks)),)
        self._moves[name]((grid,), (MOVE_THREADS,), (*self._cache, *where))

    def fetch(self, table: int, host: int, capacity: int, blocks: int) -> None:
        """Ids, seeds and places of ``blocks`` blocks, a row each of ``capacity``, from page-locked ``host``."""
        grid = -(-3 * blocks // FETCH_THREADS)
        self._fetch((grid,), (FETCH_THREADS,), (*map(np.uint64, (table, host, capacity, blocks)),))

    def finish(self, blocks: int, sums: int, seeds: int, accumulators: int, checksums: int) -> None:
        """Checksums of the blocks whose sums lie at ``sums``; all but the first argument are addresses on the GPU."""
        warps, count = -(-blocks // FOLD_THREADS), np.uint64(blocks)
        self._fold((8 * warps,), (FOLD_THREADS,), (*map(np.uint64, (sums, seeds, accumulators)), count))
        self._merge((warps,), (FOLD_THREADS,), (*map(np.uint64, (accumulators, seeds, checksums)), count))
