"""Blocks of a paged cache on a GPU that benchmarks save in a pool and load from it."""

import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool.core.errors import KvpoolError
from kvpool.core.limits import HASH_BYTES
from kvpool.gpu import GpuBlocks, GpuCache, PageRuns, require_gpu
from kvpool.transport.blocks import Bytes, DeviceMemory, FarBlocks, Moved, Seeds

CACHE_TIMES = 4
"""A cache holds so many times what is moved, and the blocks lie in it in random order."""


class GpuNoteRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="gpu_note"):
    """Another figure of the same run, with its unit."""

    what: str
    value: float
    unit: str


class Watched(FarBlocks):
    """Blocks of a GPU's cache; ``times_s`` gets the beginning and end of each move."""

    def __init__(self, blocks: GpuBlocks, times_s: list[float]) -> None:
        super().__init__(blocks.block_bytes)
        self._blocks = blocks
        self._times_s = times_s

    def __len__(self) -> int:
        return len(self._blocks)

    def select(self, blocks: Sequence[int]) -> "Watched":
        """See `Blocks.select`."""
        return Watched(self._blocks.select(blocks), self._times_s)

    def joined(self, others: Sequence[FarBlocks]) -> "Watched":
        """See `FarBlocks.joined`."""
        return Watched(self._blocks.joined([b._blocks for b in others if isinstance(b, Watched)]), self._times_s)

    def expect_load(self) -> None:
        """See `FarBlocks.expect_load`."""
        self._blocks.expect_load()

    def expect_store(self) -> None:
        """See `FarBlocks.expect_store`."""
        self._blocks.expect_store()

    def begin_load(
        self, memory: Bytes | DeviceMemory, starts: NDArray[np.uint64], seeds: Seeds, *, lasting: bool
    ) -> Moved:
        """See `FarBlocks.begin_load`."""
        self._times_s.append(time.perf_counter())
        return self._until(self._blocks.begin_load(memory, starts, seeds, lasting=lasting))

    def begin_store(
        self, memory: Bytes | DeviceMemory, starts: NDArray[np.uint64], seeds: Seeds, *, lasting: bool
    ) -> Moved:
        """See `FarBlocks.begin_store`."""
        self._times_s.append(time.perf_counter())
        return self._until(self._blocks.begin_store(memory, starts, seeds, lasting=lasting))

    def _until(self, moved: Moved) -> Moved:
        def end() -> NDArray[np.uint64]:
            checksums = moved()
            self._times_s.append(time.perf_counter())
            return checksums

        return end


class CacheBlocks:
    """Blocks that are saved, and others that they are loaded into, in a cache of one layout.

    Args:
        keyspace: Where they are saved; its blocks have the length of the cache's.
        memory: The cache: a CuPy array of `CACHE_TIMES` as many bytes as are moved.
        blocks: How many are moved at a time.
        layers: Pages of a block; one: the whole block is one page.
        name: What rows and errors call it.
        copy_engine: See `GpuCache`.
    """

    def __init__(
        self,
        keyspace: kvpool.Keyspace,
        memory: Any,  # noqa: ANN401 - CuPy's
        blocks: int,
        layers: int,
        name: str,
        *,
        copy_engine: bool = True,
    ) -> None:
        self.keyspace = keyspace
        self.name = name
        self.count = blocks
        in_cache, page_bytes = CACHE_TIMES * blocks, keyspace.namespace.block_bytes // layers
        self.moved_bytes = blocks * layers * page_bytes
        runs = PageRuns(
            tuple(layer * in_cache * page_bytes for layer in range(layers)), page_bytes, page_bytes, in_cache
        )
        self.cache = GpuCache(memory.data.ptr, runs, owner=memory, copy_engine=copy_engine)
        self._pages = memory.reshape(layers, in_cache, page_bytes)
        order = np.random.default_rng(2).permutation(in_cache)
        self.sources, self.targets = order[:blocks], order[blocks : 2 * blocks]
        self.moved_s: list[float] = []
        self._times_s: list[float] = []
        self.saved = b""
        self._reservation: kvpool.Reservation | None = None

    def reserve(self) -> None:
        """Reserve places for them under names that are new."""
        self.saved = os.urandom(HASH_BYTES * self.count)
        self._reservation = self.keyspace.reserve(self.saved)

    def write(self) -> None:
        """Save them in the places reserved, as an engine's worker does; raises KvpoolError if not all were."""
        assert self._reservation is not None
        written = self.keyspace.write(self._reservation, self._watched(self.sources))
        if len(written.committed) != self.count:
            raise KvpoolError(f"only {len(written.committed)} of {self.count} blocks were saved: {written}")

    def save(self) -> None:
        """Both."""
        self.reserve()
        self.write()

    def load(self) -> None:
        """Load what was saved last into the other blocks; raises KvpoolError if not all of it was."""
        result = self.keyspace.load(self.saved, self._watched(self.targets))
        if result.loaded != self.count:
            raise KvpoolError(
                f"only {result.loaded} of {self.count} blocks were loaded: {sorted(set(filter(None, result.reasons)))}"
            )

    def note_moved(self) -> None:
        """Keep how long the last transfer alone took."""
        self.moved_s.append(self._times_s[-1] - self._times_s[0])

    def clear(self) -> None:
        """Zeros where blocks are loaded."""
        self._pages[:, self.targets] = 0
        require_gpu().cuda.runtime.deviceSynchronize()

    def match(self) -> None:
        """`clear`, and then what an engine's scheduler does before its worker loads: the service is awake after it."""
        self.clear()
        self.keyspace.match(self.saved)

    def check(self) -> None:
        """Raises KvpoolError unless the loaded blocks are the saved ones, byte for byte."""
        cupy = require_gpu()
        for saved, loaded in zip(self.sources.tolist(), self.targets.tolist(), strict=True):
            if not cupy.array_equal(self._pages[:, saved], self._pages[:, loaded]):
                raise KvpoolError(f"block {loaded} is not what was saved from block {saved} ({self.name})")

    def _watched(self, ids: NDArray[np.int64]) -> Watched:
        self._times_s = []
        return Watched(self.cache.blocks(ids), self._times_s)
