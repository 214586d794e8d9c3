"""A paged KV cache in GPU memory, as the destination of loads and the source of stores.

``keyspace.load(hashes, GpuCache.of(tensor).blocks([7, 3, 12]))`` fills three blocks of a CUDA tensor, each verified on
the GPU over what arrived there.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import InvalidBufferError, UnavailableError
from kvpool.gpu.layout import PageRuns, check_for_gpu
from kvpool.gpu.need import require_gpu
from kvpool.transport.blocks import Bytes, DeviceMemory, FarBlocks, Moved, Seeds


class GpuCache:
    """Blocks of a paged KV cache on one GPU. Thread-safe; memory for staging (about 130 MiB) goes with the object.

    Args:
        address: Of the cache's allocation.
        runs: Where its pages lie.
        device: Number of the GPU; by default the current one.
        owner: Kept while this object lives, e.g. the tensor that owns the memory.
        copy_engine: Whether large pages may go by the copy engine, and not all through kernels.

    Raises:
        UnavailableError: No CuPy, no GPU, or a CuPy that does not fit it.
        InvalidBufferError: A layout that the kernels cannot move.
        MemoryError: No GPU memory left for staging.
    """

    def __init__(
        self,
        address: int,
        runs: PageRuns,
        *,
        device: int | None = None,
        owner: object = None,
        copy_engine: bool = True,
    ) -> None:
        check_for_gpu(runs, address)
        cupy = require_gpu()
        # Imported here: these need CuPy, and whoever has no GPU need not have it.
        from kvpool.gpu.copies import CopyEngine  # noqa: PLC0415
        from kvpool.gpu.kernels import Kernels  # noqa: PLC0415
        from kvpool.gpu.lanes import TO_GPU, TO_HOST, Lane  # noqa: PLC0415

        self.runs = runs
        self._owner = owner
        self._device: int = cupy.cuda.Device().id if device is None else device
        engine = None
        if copy_engine:
            try:
                engine = CopyEngine()
            except UnavailableError:
                engine = None  # an older driver: kernels move everything
        try:
            with cupy.cuda.Device(self._device):
                kernels = Kernels(runs, address)
                self._loads, self._stores = (
                    Lane(way, runs, address, kernels, engine, self._device) for way in (TO_GPU, TO_HOST)
                )
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(f"no GPU memory is left for staging: {error}") from error
        except Exception as error:  # CuPy's own, e.g. when it was built for another CUDA
            raise UnavailableError(f"GPU {self._device} cannot be used through CuPy: {error}") from error

    @classmethod
    def of(cls, array: Any, **options: Any) -> "GpuCache":  # noqa: ANN401 - whatever has the CUDA array interface
        """A cache of one contiguous CUDA array (CuPy, or torch but for dtypes NumPy lacks: view those as uint8).

        The first axis counts blocks; the rest is a block's bytes.

        Raises:
            InvalidBufferError: No such array, or not contiguous.
        """
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise InvalidBufferError(f"a {type(array).__name__} is no CUDA array; give a CuPy array or a CUDA tensor")
        if interface.get("strides") is not None:
            raise InvalidBufferError("the CUDA array is not contiguous; describe its pages with PageRuns")
        blocks, *rest = interface["shape"]
        size_bytes = int(np.prod(rest, dtype=np.int64)) * np.dtype(interface["typestr"]).itemsize
        runs = PageRuns((0,), size_bytes, size_bytes, blocks)
        return cls(interface["data"][0], runs, owner=array, **options)

    def blocks(self, ids: Sequence[int] | NDArray[Any]) -> "GpuBlocks":
        """Blocks of the cache, for `Keyspace.load`, `store` and `write`.

        They stay the caller's: while a call runs nobody else may write them, and what computed those that are stored
        must have ended.

        Raises:
            InvalidBufferError: A block that the cache does not have, or one given twice.
        """
        chosen = np.asarray(ids, np.int64).reshape(-1)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < self.runs.blocks:
            raise InvalidBufferError(
                f"blocks {chosen.min()} to {chosen.max()} were given; the cache has 0 to {self.runs.blocks - 1}"
            )
        if len(set(chosen.tolist())) < len(chosen):
            raise InvalidBufferError("a block of the cache was given twice; it can hold only one")
        return GpuBlocks(self, chosen.astype(np.uint64))

    def wait_pinned(self, timeout_s: float) -> bool:
        """Wait until the mappings met so far are page-locked, and copies fast; whether all are."""
        from kvpool.gpu.pinning import wait_pinned  # noqa: PLC0415 - needs CuPy

        return wait_pinned(timeout_s)


class GpuBlocks(FarBlocks):
    """Some blocks of a `GpuCache`; made by it."""

    __slots__ = ("_cache", "_ids")

    def __init__(self, cache: GpuCache, ids: NDArray[np.uint64]) -> None:
        super().__init__(cache.runs.block_bytes)
        self._cache = cache
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def select(self, blocks: Sequence[int]) -> "GpuBlocks":
        """See `Blocks.select`."""
        if isinstance(blocks, range) and blocks.step == 1:
            return GpuBlocks(self._cache, self._ids[blocks.start : blocks.stop])
        return GpuBlocks(self._cache, self._ids[np.asarray(blocks, np.intp)])

    def joined(self, others: Sequence[FarBlocks]) -> "GpuBlocks":
        """See `FarBlocks.joined`."""
        return GpuBlocks(self._cache, np.concatenate([b._ids for b in (self, *others) if isinstance(b, GpuBlocks)]))

    def expect_load(self) -> None:
        """See `FarBlocks.expect_load`."""
        with suppress(UnavailableError):  # the load itself will say so
            self._cache._loads.rehearse(self._ids)

    def expect_store(self) -> None:
        """See `FarBlocks.expect_store`."""
        with suppress(UnavailableError):
            self._cache._stores.rehearse(self._ids)

    def begin_load(
        self, memory: Bytes | DeviceMemory, starts: NDArray[np.uint64], seeds: Seeds, *, lasting: bool
    ) -> Moved:
        """See `FarBlocks.begin_load`."""
        return self._cache._loads.begin(memory, starts, self._ids, seeds, lasting=lasting)

    def begin_store(
        self, memory: Bytes | DeviceMemory, starts: NDArray[np.uint64], seeds: Seeds, *, lasting: bool
    ) -> Moved:
        """See `FarBlocks.begin_store`."""
        return self._cache._stores.begin(memory, starts, self._ids, seeds, lasting=lasting)
