"""Launching the kernels of `kernels.cu`, compiled for one cache's layout when it is opened (0.1 to 0.7 s)."""

from importlib.resources import files
from typing import Any

import cupy
import numpy as np

from kvpool.gpu.layout import PageRuns

MOVE_THREADS = 512
"""A thread block on each multiprocessor reads at 3.1 TB/s with so many threads; the fewest that come near the limit."""

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
        self._moves = {name: module.get_function(name) for name in ("scatter", "gather", "sum")}
        self._fold = module.get_function("fold")
        self._merge = module.get_function("merge")
        offsets = cupy.asarray(np.array(runs.offsets, np.uint64))
        self._cache = (np.uint64(address), offsets, np.uint64(runs.stride))
        self._work = 4 * -(-runs.block_bytes // 1024)
        self._multiprocessors: int = cupy.cuda.Device().attributes["MultiProcessorCount"]

    def move(self, name: str, ids: Any, packed: int, seeds: Any, sums: int) -> None:  # noqa: ANN401 - CuPy's arrays
        """``scatter``, ``gather`` or ``sum`` blocks ``ids``; ``packed`` and ``sums`` are addresses."""
        blocks = len(ids)
        grid = min(self._multiprocessors, -(-blocks * self._work // MOVE_THREADS))
        where = (ids, np.uint64(packed), seeds, np.uint64(sums), np.uint64(blocks))
        self._moves[name]((grid,), (MOVE_THREADS,), (*self._cache, *where))

    def finish(self, sums: int, seeds: Any, accumulators: Any, checksums: Any) -> None:  # noqa: ANN401 - CuPy's arrays
        """Checksums of the blocks whose sums lie at ``sums``."""
        blocks, warps = np.uint64(len(seeds)), -(-len(seeds) // FOLD_THREADS)
        self._fold((8 * warps,), (FOLD_THREADS,), (np.uint64(sums), seeds, accumulators, blocks))
        self._merge((warps,), (FOLD_THREADS,), (accumulators, seeds, checksums, blocks))
