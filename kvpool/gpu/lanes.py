"""One direction of traffic between a pool's memory and a paged cache: streams, staging, and what checks the bytes.

Three ways. Between a store node's GPU memory and the cache a kernel moves blocks straight from or to their pages, and
sums them as it does. Pages of 64 KiB and more are loaded from host memory, and larger ones from a GPU's, by the copy
engine, straight to their places; a kernel only reads them, to sum them. Smaller pages, saves, and memory that is not
page-locked yet go through a ring of staging buffers in GPU memory in large copies, and a kernel moves and sums at once.
docs/design/gpu.md has the figures that this was chosen by.

Nothing here uses the compute stream or waits on it: callers wait for what computed the pages before they store them.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import UnavailableError
from kvpool.gpu.copies import Addresses, Copies, CopyEngine, packed_copies, page_copies
from kvpool.gpu.kernels import Kernels, sums_bytes
from kvpool.gpu.layout import PageRuns
from kvpool.gpu.pinning import PIECE_BYTES, pinned
from kvpool.transport.blocks import Bytes, DeviceMemory, Moved, Seeds

log = logging.getLogger("kvpool.gpu")

CALL_BYTES = 512 << 20
CALL_BLOCKS = 4_096
"""Bytes and blocks that are moved and then checked in one go; longer calls are cut."""

PART_BYTES = 16 << 20
"""Bytes of one staging buffer: large enough for the link's full speed."""

LIST_PAGES = 256
"""Pages of one list of copies: longer lists are slower, shorter ones cost a processor more."""

CHECK_BYTES = 256 << 20
"""Copied bytes that one launch sums: each one disturbs what the GPU computes, and a call waits for the last."""

RING = 2

TO_GPU = 1
TO_HOST = 2
"""Ways, by CUDA's own numbers."""

ENGINE_PAGE_BYTES = 64 << 10
"""Least page that is loaded by the copy engine: a copy takes 0.5 to 1 µs of a processor, smaller ones longer than the
link needs for them."""

PEER_PAGE_BYTES = 1 << 20
"""Least page that is loaded by the copy engine from another GPU, whose link is so much faster. On one GPU kernels are
faster, whatever the page."""


class _Call:
    """What one call needs of its own: ids, seeds, places and checksums; and when it has ended.

    Kernels fetch the ones from host memory and write the others there: a copy would wait behind those of the blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._capacity = blocks
        self._table = cupy.empty((3, blocks), np.uint64)
        locked = cupy.cuda.alloc_pinned_memory(4 * blocks * self._table.itemsize)
        self._host: NDArray[np.uint64] = np.frombuffer(locked, np.uint64, 4 * blocks).reshape(4, blocks)
        self.ids: int = self._table.data.ptr
        self.seeds = self.ids + blocks * self._table.itemsize
        self.places = self.seeds + blocks * self._table.itemsize
        self.found: int = self._host[3].ctypes.data
        self.count = 0
        self.copied: Any = None
        self.ended: Any = None
        self._unsent: tuple[Addresses, Addresses, Seeds] | None = None

    def take(self, ids: Addresses, starts: Addresses, seeds: Seeds) -> None:
        """Begin with these blocks, which begin at ``starts`` in the pool's memory."""
        self.count = len(ids)
        self._unsent = ids, starts, seeds

    def send(self, kernels: Kernels) -> None:
        """Ids, seeds and places to the GPU, unless they are there, on the current stream."""
        if self._unsent is not None:
            ids, starts, seeds = self._unsent
            self._host[0, : self.count] = ids
            self._host[1, : self.count] = seeds()
            self._host[2, : self.count] = starts
            kernels.fetch(self.ids, self._host.ctypes.data, self._capacity, self.count)
            self._unsent = None

    def checksums(self) -> Addresses:
        """The checksums, once all has been moved and checked: sleeps while it is moved, then looks for the end."""
        self.copied.synchronize()
        self.ended.synchronize()
        return self._host[3, : self.count].copy()


class Lane:
    """Moves blocks one way; each direction of a cache has its own. Thread-safe: calls follow each other on the GPU.

    Args:
        way: `TO_GPU` or `TO_HOST`.
        runs: The cache's layout, checked.
        address: Of the cache.
        kernels: Compiled for it.
        engine: The copy engine, or None to send everything through the kernels.
        device: Number of the GPU.
    """

    def __init__(
        self, way: int, runs: PageRuns, address: int, kernels: Kernels, engine: CopyEngine | None, device: int
    ) -> None:
        self._way = way
        self._runs = runs
        self._address = address
        self._kernels = kernels
        self._engine = engine if way == TO_GPU and runs.size_bytes >= ENGINE_PAGE_BYTES else None
        self._device = device
        self._lock = threading.Lock()
        self._copying = cupy.cuda.Stream(non_blocking=True)
        # First in line where a multiprocessor becomes free, or a busy engine would hold transfers up for ever.
        self._working = cupy.cuda.Stream(non_blocking=True, priority=-5)
        self._call_blocks = min(CALL_BLOCKS, max(1, CALL_BYTES // runs.block_bytes))
        self._part_blocks = max(1, PART_BYTES // runs.block_bytes)
        self._list_blocks = max(1, LIST_PAGES // len(runs.offsets))
        self._check_blocks = max(1, CHECK_BYTES // runs.block_bytes)
        self._staging = cupy.empty(RING * self._part_blocks * runs.block_bytes, np.uint8)
        self._free: list[Any] = [None] * RING
        self._parts = 0
        self._sums = cupy.empty(self._call_blocks * sums_bytes(runs.block_bytes), np.uint8)
        self._accumulators = cupy.empty((self._call_blocks, 8), np.uint64)
        self._calls = [_Call(self._call_blocks)]
        cupy.cuda.get_current_stream().synchronize()  # CuPy may still be using what it gave out

    def begin(
        self, memory: Bytes | DeviceMemory, starts: Addresses, ids: Addresses, seeds: Seeds, *, lasting: bool
    ) -> Moved:
        """Begin to move blocks ``ids`` from or to ``starts`` in the pool's memory.

        Args:
            memory: Host memory, or a store node's on a GPU.
            starts: Byte offsets into it.
            ids: Blocks of the cache, all different.
            seeds: Gives the seeds of the checksums; called when copies are under way.
            lasting: Whether ``memory`` is a mapping that will be used again, and worth page-locking.

        Returns:
            Must be called: waits until all has been moved, and answers the checksums of what the cache holds there.

        Raises:
            UnavailableError: The GPU refuses; what was to be written is not known then, but no more is. The call that
                waits may raise it too.
        """
        move = self._mover(memory, lasting=lasting)
        begun: list[_Call] = []
        with self._lock, self._errors():
            for blocks in _spans(range(len(ids)), self._call_blocks):
                some = slice(blocks.start, blocks.stop)
                call = self._calls.pop() if self._calls else _Call(self._call_blocks)
                begun.append(call)
                call.take(ids[some], starts[some], partial(_some_of, seeds, some))
                move(call, starts[some], ids[some])
                self._check(call)
        return partial(self._end, begun, memory)

    def rehearse(self, ids: Addresses) -> None:
        """Begin with a block for nothing, while the caller waits for places; raises UnavailableError.

        What a processor has not run for some ms takes it three times as long, and the link would wait for it.
        """
        one = ids[:1]
        with self._lock, self._errors():
            call = self._calls.pop() if self._calls else _Call(self._call_blocks)
            call.take(one, one, lambda: [0])
            packed_copies(self._runs.block_bytes, 0, one).within(0, PIECE_BYTES)
            with self._working:
                call.send(self._kernels)
            call.copied = _mark(self._copying, block=True)
            self._calls.append(call)  # what it fetches next is behind this on the stream

    def _mover(self, memory: Bytes | DeviceMemory, *, lasting: bool) -> Callable[[_Call, Addresses, Addresses], None]:
        """What moves blocks between ``memory`` and the cache."""
        if isinstance(memory, DeviceMemory):
            base = memory.address(self._device)
            by_engine = self._engine is not None and self._runs.size_bytes >= PEER_PAGE_BYTES
            if by_engine and not memory.is_on(self._device):
                return partial(self._by_engine, base, base)
            return partial(self._by_reach, base)
        mapping = pinned(memory, self._device) if lasting else None
        direct = self._engine is not None and mapping is not None and mapping.complete
        where = memory.ctypes.data, mapping.origin if mapping is not None else 0
        return partial(self._by_engine if direct else self._by_kernel, *where)

    def _end(self, begun: list[_Call], memory: Bytes | DeviceMemory) -> Addresses:
        with self._errors():
            checksums = np.concatenate([call.checksums() for call in begun])
        self._calls += begun
        del memory  # kept until now: a mapping that is dropped while it is copied from or to would go at once
        return checksums

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """On this lane's GPU; when anything fails, nothing is under way any more."""
        with cupy.cuda.Device(self._device) as gpu:
            try:
                gpu.use()  # makes its context this thread's: the copy engine's call, of the driver's own, does not
                yield
            except BaseException as error:
                with suppress(cupy.cuda.runtime.CUDARuntimeError):
                    self._copying.synchronize()
                    self._working.synchronize()
                log.warning("a transfer with GPU %d failed: %s", self._device, error)
                if isinstance(error, cupy.cuda.runtime.CUDARuntimeError):
                    raise UnavailableError(f"the GPU refuses a transfer: {error}") from error
                raise

    def _check(self, call: _Call) -> None:
        """Finish the checksums of a call's blocks, once all are summed."""
        call.copied = _mark(self._copying, block=True)
        with self._working:
            self._kernels.finish(call.count, self._sums.data.ptr, call.seeds, self._accumulators.data.ptr, call.found)
        call.ended = _mark(self._working)

    def _by_reach(self, base: int, call: _Call, starts: Addresses, ids: Addresses) -> None:
        del starts  # the call has them
        self._move("pull" if self._way == TO_GPU else "push", call, range(len(ids)), base)

    def _by_engine(self, base: int, origin: int, call: _Call, starts: Addresses, ids: Addresses) -> None:
        assert self._engine is not None
        host = starts + np.uint64(base)
        pages = len(self._runs.offsets)
        # A processor is hardly faster with lists of pages than the link is: it needs a start.
        staged = min(RING * self._part_blocks, len(ids)) if pages > 1 and self._copying.done else 0
        self._stage(origin, call, host, range(staged))
        for checked in _spans(range(staged, len(ids)), self._check_blocks):
            some = slice(checked.start, checked.stop)
            copies = page_copies(self._runs, self._address, ids[some], host[some])
            for part in _spans(range(len(checked)), self._list_blocks):
                now = copies.part(part.start * pages, part.stop * pages).within(origin, PIECE_BYTES)
                self._engine.copy(now.device, now.host, now.size_bytes, self._copying.ptr)
            self._working.wait_event(_mark(self._copying))
            self._move("sum", call, checked, 0)

    def _by_kernel(self, base: int, origin: int, call: _Call, starts: Addresses, ids: Addresses) -> None:
        self._stage(origin, call, starts + np.uint64(base), range(len(ids)))

    def _stage(self, origin: int, call: _Call, host: Addresses, blocks: range) -> None:
        """Move ``blocks`` of the call, which lie at ``host``, through the staging buffers."""
        for part in _spans(blocks, self._part_blocks):
            buffer, self._parts = self._parts % RING, self._parts + 1
            at = self._staging.data.ptr + buffer * self._part_blocks * self._runs.block_bytes
            copies = packed_copies(self._runs.block_bytes, at, host[part.start : part.stop]).within(origin, PIECE_BYTES)
            first, then = (self._copying, self._working) if self._way == TO_GPU else (self._working, self._copying)
            if self._free[buffer] is not None:
                first.wait_event(self._free[buffer])
            if self._way == TO_GPU:
                self._copy(copies)
            else:
                self._move("gather", call, part, at)
            then.wait_event(_mark(first))
            if self._way == TO_GPU:
                self._move("scatter", call, part, at)
            else:
                self._copy(copies)
            self._free[buffer] = _mark(then)

    def _move(self, kernel: str, call: _Call, blocks: range, packed: int) -> None:
        sums = self._sums.data.ptr + blocks.start * sums_bytes(self._runs.block_bytes)
        with self._working:
            call.send(self._kernels)
            ids, seeds, places = (rows + 8 * blocks.start for rows in (call.ids, call.seeds, call.places))
            self._kernels.move(kernel, len(blocks), ids, packed, places, seeds, sums)

    def _copy(self, copies: Copies) -> None:
        for host, device, size_bytes in zip(
            copies.host.tolist(), copies.device.tolist(), copies.size_bytes.tolist(), strict=True
        ):
            to, source = (device, host) if self._way == TO_GPU else (host, device)
            cupy.cuda.runtime.memcpyAsync(to, source, size_bytes, self._way, self._copying.ptr)


def _spans(blocks: range, step: int) -> Iterator[range]:
    """``blocks`` in ranges of up to ``step``."""
    for first in range(blocks.start, blocks.stop, step):
        yield range(first, min(first + step, blocks.stop))


def _some_of(seeds: Seeds, some: slice) -> Sequence[int] | Addresses:
    return seeds()[some]


def _mark(stream: Any, *, block: bool = False) -> Any:  # noqa: ANN401 - CuPy's streams and events
    """An event for what was begun on ``stream`` so far; with ``block``, whoever waits for it sleeps."""
    event = cupy.cuda.Event(block=block, disable_timing=True)
    event.record(stream)
    return event
