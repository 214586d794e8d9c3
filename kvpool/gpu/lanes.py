"""One direction of traffic between host memory and a paged cache: streams, staging, and what checks the bytes.

Two ways. Pages of 64 KiB and more go by the copy engine, straight between host memory and their places; a kernel only
reads them to sum them (`CopyEngine`). Smaller pages, and memory that is not page-locked yet, go through a ring of
staging buffers in GPU memory in large copies, and a kernel moves and sums them at once. docs/design/gpu.md has the
figures that this was chosen by.

Nothing here uses the compute stream or waits on it: callers wait for what computed the pages before they store them.
"""

import threading
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import UnavailableError
from kvpool.gpu.copies import Addresses, Copies, CopyEngine, packed_copies, page_copies
from kvpool.gpu.kernels import Kernels, sums_bytes
from kvpool.gpu.layout import PageRuns
from kvpool.gpu.pinning import PIECE_BYTES, pinned
from kvpool.transport.blocks import Bytes

CALL_BYTES = 512 << 20
CALL_BLOCKS = 4_096
"""Bytes and blocks that are moved and then checked in one go; longer calls are cut."""

PART_BYTES = 16 << 20
"""Bytes of one staging buffer, or of one list of copies: large enough for the link's full speed."""

CHECK_BYTES = 128 << 20
"""Copied bytes that one launch sums: few launches disturb computing little, the last one delays a call little."""

RING = 2
ENGINE_PAGE_BYTES = 64 << 10
"""Least page for the copy engine: 1 µs of a processor a copy; smaller pages cost it more than the link's time."""

_TO_DEVICE = 1
_TO_HOST = 2


class Lane:
    """Moves blocks one way, one call at a time; each direction of a cache has its own. Thread-safe.

    Args:
        runs: The cache's layout, checked.
        address: Of the cache.
        kernels: Compiled for it.
        engine: The copy engine, or None to send everything through the kernels.
        device: Number of the GPU.
    """

    def __init__(self, runs: PageRuns, address: int, kernels: Kernels, engine: CopyEngine | None, device: int) -> None:
        self._runs = runs
        self._address = address
        self._kernels = kernels
        self._engine = engine if runs.size_bytes >= ENGINE_PAGE_BYTES else None
        self._device = device
        self._lock = threading.Lock()
        self._copying = cupy.cuda.Stream(non_blocking=True)
        # First in line where a multiprocessor becomes free, or a busy engine would hold transfers up for ever.
        self._working = cupy.cuda.Stream(non_blocking=True, priority=-5)
        self._call_blocks = min(CALL_BLOCKS, max(1, CALL_BYTES // runs.block_bytes))
        self._part_blocks = max(1, PART_BYTES // runs.block_bytes)
        self._check_blocks = max(1, CHECK_BYTES // runs.block_bytes)
        self._staging = cupy.empty(RING * self._part_blocks * runs.block_bytes, np.uint8)
        self._sums = cupy.empty(self._call_blocks * sums_bytes(runs.block_bytes), np.uint8)
        self._accumulators = cupy.empty((self._call_blocks, 8), np.uint64)
        self._table = cupy.empty((3, self._call_blocks), np.uint64)
        locked = cupy.cuda.alloc_pinned_memory(self._table.nbytes)
        self._host_table: NDArray[np.uint64] = np.frombuffer(locked, np.uint64, self._table.size)
        self._host_table = self._host_table.reshape(self._table.shape)
        cupy.cuda.get_current_stream().synchronize()  # CuPy may still be clearing what it gave out

    def load(self, memory: Bytes, starts: Addresses, ids: Addresses, seeds: list[int], *, lasting: bool) -> list[int]:
        """Copy blocks that begin at ``starts`` in host memory to blocks ``ids``; the checksums of what arrived.

        Args:
            memory: Host memory.
            starts: Byte offsets into it.
            ids: Blocks of the cache, all different.
            seeds: Of the checksums.
            lasting: Whether ``memory`` is a mapping that will be used again, and worth page-locking.

        Raises:
            UnavailableError: The GPU refuses; what the blocks hold then is not known, but no more is written.
        """
        return self._run(memory, starts, ids, seeds, lasting=lasting, kind=_TO_DEVICE)

    def store(self, memory: Bytes, starts: Addresses, ids: Addresses, seeds: list[int], *, lasting: bool) -> list[int]:
        """The reverse: the checksums are of what was read from the cache."""
        return self._run(memory, starts, ids, seeds, lasting=lasting, kind=_TO_HOST)

    def _run(
        self, memory: Bytes, starts: Addresses, ids: Addresses, seeds: list[int], *, lasting: bool, kind: int
    ) -> list[int]:
        host = starts + np.uint64(memory.ctypes.data)
        mapping = pinned(memory, self._device) if lasting else None
        direct = self._engine is not None and mapping is not None and mapping.complete
        origin = mapping.origin if mapping is not None else 0
        checksums: list[int] = []
        try:
            with self._lock, cupy.cuda.Device(self._device):
                for call in _spans(len(ids), self._call_blocks):
                    some = slice(call.start, call.stop)
                    self._begin(ids[some], seeds[some])
                    move = self._by_engine if direct else self._by_kernel
                    try:
                        move(host[some], ids[some], origin, kind)
                        checksums += self._end(len(call))
                    except BaseException:
                        self._rest()  # nothing is written once the caller was told
                        raise
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise UnavailableError(f"the GPU refuses a transfer: {error}") from error
        return checksums

    def _begin(self, ids: Addresses, seeds: list[int]) -> None:
        count = len(ids)
        self._host_table[0, :count] = ids
        self._host_table[1, :count] = seeds
        with self._working:
            for row in (0, 1):
                self._table[row, :count].set(self._host_table[row, :count])

    def _end(self, count: int) -> list[int]:
        """Finish the checksums of a call's blocks, and wait for all of it."""
        seeds, found = self._table[1, :count], self._table[2, :count]
        with self._working:
            self._kernels.finish(self._sums.data.ptr, seeds, self._accumulators, found)
            found.get(out=self._host_table[2, :count], blocking=False)
        self._rest()
        checksums: list[int] = self._host_table[2, :count].tolist()
        return checksums

    def _by_engine(self, host: Addresses, ids: Addresses, origin: int, kind: int) -> None:
        assert self._engine is not None
        for checked in _spans(len(ids), self._check_blocks):
            for part in _spans(len(checked), self._part_blocks):
                some = slice(checked.start + part.start, checked.start + part.stop)
                copies = page_copies(self._runs, self._address, ids[some], host[some]).within(origin, PIECE_BYTES)
                to, source = (copies.device, copies.host) if kind == _TO_DEVICE else (copies.host, copies.device)
                self._engine.copy(to, source, copies.size_bytes, self._copying.ptr)
            if kind == _TO_DEVICE:
                self._working.wait_event(_mark(self._copying))
            self._move("sum", checked, 0)

    def _by_kernel(self, host: Addresses, ids: Addresses, origin: int, kind: int) -> None:
        part_bytes = self._part_blocks * self._runs.block_bytes
        free: list[Any] = [None] * RING
        for n, part in enumerate(_spans(len(ids), self._part_blocks)):
            at = self._staging.data.ptr + n % RING * part_bytes
            copies = packed_copies(self._runs.block_bytes, at, host[part.start : part.stop]).within(origin, PIECE_BYTES)
            before, after = (self._copying, self._working) if kind == _TO_DEVICE else (self._working, self._copying)
            if free[n % RING] is not None:
                before.wait_event(free[n % RING])
            if kind == _TO_DEVICE:
                self._copy(copies, kind)
                after.wait_event(_mark(before))
                self._move("scatter", part, at)
            else:
                self._move("gather", part, at)
                after.wait_event(_mark(before))
                self._copy(copies, kind)
            free[n % RING] = _mark(after)

    def _move(self, kernel: str, blocks: range, packed: int) -> None:
        some = slice(blocks.start, blocks.stop)
        sums = self._sums.data.ptr + blocks.start * sums_bytes(self._runs.block_bytes)
        with self._working:
            self._kernels.move(kernel, self._table[0, some], packed, self._table[1, some], sums)

    def _copy(self, copies: Copies, kind: int) -> None:
        for host, device, size_bytes in zip(
            copies.host.tolist(), copies.device.tolist(), copies.size_bytes.tolist(), strict=True
        ):
            to, source = (device, host) if kind == _TO_DEVICE else (host, device)
            cupy.cuda.runtime.memcpyAsync(to, source, size_bytes, kind, self._copying.ptr)

    def _rest(self) -> None:
        for stream in (self._copying, self._working):
            _mark(stream, block=True).synchronize()


def _spans(count: int, step: int) -> Iterator[range]:
    """``range(count)`` in ranges of up to ``step``."""
    for first in range(0, count, step):
        yield range(first, min(first + step, count))


def _mark(stream: Any, *, block: bool = False) -> Any:  # noqa: ANN401 - CuPy's streams and events
    """An event for what was begun on ``stream`` so far; with ``block``, whoever waits for it sleeps."""
    event = cupy.cuda.Event(block=block, disable_timing=True)
    event.record(stream)
    return event
