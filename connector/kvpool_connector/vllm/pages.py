"""The engine's paged KV cache as blocks: gathering a block's pages of all layers side by side, and scattering them.

A stored block is the pages of all layers, in the order of the model, one after the other. vLLM hands out one tensor a
layer, logically (blocks, heads, tokens, content) and possibly strided; what is stored is the memory itself, so that
packed formats and padding travel unseen.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool import KvpoolError
from kvpool.gpu import GpuBlocks, GpuCache, PageRuns

LOAD_STEP_BYTES = 8 << 20
"""Blocks are loaded and scattered so many bytes at a time: they are still in the cache when they are scattered."""

GPU_STEP_BYTES = 512 << 20
"""The same where blocks go straight into GPU memory: so long that waiting for the last check costs little."""

Bytes = NDArray[np.uint8]


log = logging.getLogger("vllm.kvpool")


class UnsupportedLayoutError(Exception):
    """A KV cache whose pages cannot be described as one run of bytes a block and layer."""


def page_runs(caches: Mapping[str, torch.Tensor]) -> PageRuns:
    """Where the pages of all layers lie.

    Raises:
        UnsupportedLayoutError: Layers in several allocations, of several shapes, or with pages in pieces.
    """
    tensors = list(caches.values())
    if not tensors or any(not isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise UnsupportedLayoutError("the KV cache has layers that are not one tensor each (state layers)")
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
        raise UnsupportedLayoutError("the KV cache is not one allocation")
    if len({(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors}) > 1:
        raise UnsupportedLayoutError("the layers' KV caches differ in shape")
    first = tensors[0]
    item = first.element_size()
    stride = first.stride(0) * item
    offsets = [tensor.storage_offset() * item for tensor in tensors]
    span = _span(first) * item
    if span == first[0].numel() * item:
        return PageRuns(tuple(offsets), stride, span, first.shape[0])
    # Pages in pieces: fine where the layers interleave and fill each block's run together.
    begin, end = min(offsets), max(offsets) + span
    if end - begin != len(tensors) * first[0].numel() * item or stride < end - begin:
        raise UnsupportedLayoutError("a page is neither one run of bytes, nor part of its block's run")
    return PageRuns((begin,), stride, end - begin, first.shape[0])


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of one block's page."""
    strides: tuple[int, ...] = tensor.stride()[1:]
    last = sum((n - 1) * s for n, s in zip(tensor.shape[1:], strides, strict=True))
    return int(last) + 1


class Pages(ABC):
    """Moves blocks between the engine's cache and plain host memory; called from background threads.

    The cache belongs to the engine: callers hold references to the blocks they name while a call runs.
    """

    step_bytes = LOAD_STEP_BYTES
    """About how much to load at a time."""

    def __init__(self, runs: PageRuns) -> None:
        self.runs = runs

    def direct(self, blocks: Sequence[int]) -> GpuBlocks | None:
        """The blocks as a buffer of kvpool's client; None where it takes `gather` and `scatter`."""
        del blocks
        return None

    @abstractmethod
    def gather(self, blocks: Sequence[int], out: Bytes) -> None:
        """Copy the blocks' pages into ``out``, shape (blocks, block_bytes)."""

    @abstractmethod
    def scatter(self, blocks: Sequence[int], data: Bytes) -> None:
        """Copy ``data``, shape (blocks, block_bytes), over the blocks' pages; done when it returns."""

    @abstractmethod
    def fence(self) -> Any:  # noqa: ANN401 - opaque
        """What `wait` needs to know that everything launched so far by this thread has run."""

    @abstractmethod
    def wait(self, fence: Any) -> None:  # noqa: ANN401 - opaque
        """Wait for a fence."""


def open_pages(caches: Mapping[str, torch.Tensor]) -> Pages:
    """The pages of the engine's KV cache; raises UnsupportedLayoutError."""
    runs = page_runs(caches)
    storage = next(iter(caches.values())).untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type == "cpu":
        return HostPages(memory.numpy(), runs)
    try:
        return GpuPages(memory, runs)
    except (KvpoolError, MemoryError) as error:
        log.warning("kvpool moves GPU pages by torch's indexing, which is slow: %s", error)
        return DevicePages(memory, runs)


class HostPages(Pages):
    """A KV cache in host memory. NumPy's indexing copies a page at a time and releases the interpreter lock."""

    def __init__(self, memory: Bytes, runs: PageRuns) -> None:
        super().__init__(runs)
        self._layers = [_layers_view(memory, part) for part in _parts(runs)]

    def gather(self, blocks: Sequence[int], out: Bytes) -> None:
        """See `Pages.gather`."""
        for view, pages in self._each(out, blocks):
            pages[...] = view[:, blocks].transpose(1, 0, 2)

    def scatter(self, blocks: Sequence[int], data: Bytes) -> None:
        """See `Pages.scatter`."""
        for view, pages in self._each(data, blocks):
            view[:, blocks] = pages.transpose(1, 0, 2)

    def fence(self) -> None:
        """The CPU back end has run a step when it returns from it."""

    def wait(self, fence: None) -> None:
        """See `fence`."""

    def _each(self, data: Bytes, blocks: Sequence[int]) -> list[tuple[Bytes, Bytes]]:
        rows = data.reshape(len(blocks), len(self.runs.offsets), self.runs.size_bytes)
        if len(self._layers) == 1:
            return [(self._layers[0], rows)]
        return [(view, rows[:, i : i + 1]) for i, view in enumerate(self._layers)]


class DevicePages(Pages):
    """A KV cache in device memory, moved by torch's indexing on a stream of its own."""

    def __init__(self, memory: torch.Tensor, runs: PageRuns) -> None:
        super().__init__(runs)
        self._layers = [_layers_tensor(memory, part) for part in _parts(runs)]
        self._stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None
        self._device = memory.device

    def gather(self, blocks: Sequence[int], out: Bytes) -> None:
        """See `Pages.gather`."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._device)
            parts = [layer.index_select(1, index).transpose(0, 1) for layer in self._layers]
            whole = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            torch.from_numpy(out).copy_(whole.reshape(out.shape))

    def scatter(self, blocks: Sequence[int], data: Bytes) -> None:
        """See `Pages.scatter`."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._device)
            rows = torch.from_numpy(data).to(self._device)
            rows = rows.reshape(len(blocks), len(self.runs.offsets), self.runs.size_bytes).transpose(0, 1)
            at = 0
            for layer in self._layers:
                layer.index_copy_(1, index, rows[at : at + len(layer)])
                at += len(layer)
        if self._stream is not None:
            self._stream.synchronize()

    def fence(self) -> Any:  # noqa: ANN401 - a CUDA event
        """An event on the compute stream: the forward may still run when a step's hooks are called."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, fence: Any) -> None:  # noqa: ANN401 - a CUDA event
        """See `Pages.wait`."""
        if fence is not None:
            fence.synchronize()


class GpuPages(DevicePages):
    """A KV cache in CUDA memory, moved by kvpool's copy engine and kernels.

    Raises:
        UnavailableError: No CuPy, or no GPU.
        InvalidBufferError: Pages that the kernels cannot move.
        MemoryError: No GPU memory left for staging.
    """

    step_bytes = GPU_STEP_BYTES

    def __init__(self, memory: torch.Tensor, runs: PageRuns) -> None:
        super().__init__(memory, runs)
        self._cache = GpuCache(memory.data_ptr(), runs, device=memory.get_device(), owner=memory)

    def direct(self, blocks: Sequence[int]) -> GpuBlocks:
        """See `Pages.direct`."""
        return self._cache.blocks(blocks)

    def gather(self, blocks: Sequence[int], out: Bytes) -> None:
        """See `Pages.gather`."""
        starts, seeds = self._whole(blocks)
        self.direct(blocks).begin_store(out.reshape(-1), starts, seeds, lasting=False)()

    def scatter(self, blocks: Sequence[int], data: Bytes) -> None:
        """See `Pages.scatter`."""
        starts, seeds = self._whole(blocks)
        self.direct(blocks).begin_load(data.reshape(-1), starts, seeds, lasting=False)()

    def _whole(self, blocks: Sequence[int]) -> tuple[NDArray[np.uint64], Callable[[], list[int]]]:
        """Where blocks lie in an array of just them; and seeds, since something has to be summed."""
        starts = np.arange(len(blocks), dtype=np.uint64) * np.uint64(self.runs.block_bytes)
        return starts, lambda: [0] * len(blocks)


def _parts(runs: PageRuns) -> list[PageRuns]:
    """All layers together where they are evenly spaced, else layer by layer."""
    if runs.layer_stride is not None:
        return [runs]
    return [PageRuns((offset,), runs.stride, runs.size_bytes, runs.blocks) for offset in runs.offsets]


def _layers_view(memory: Bytes, runs: PageRuns) -> Bytes:
    shape = (len(runs.offsets), runs.blocks, runs.size_bytes)
    strides = (runs.layer_stride or 0, runs.stride, 1)
    return np.ndarray(shape, np.uint8, memory.data, runs.offsets[0], strides)


def _layers_tensor(memory: torch.Tensor, runs: PageRuns) -> torch.Tensor:
    shape = (len(runs.offsets), runs.blocks, runs.size_bytes)
    return memory.as_strided(shape, (runs.layer_stride or 0, runs.stride, 1), runs.offsets[0])
