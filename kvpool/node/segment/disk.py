"""`disk`: payload bytes in a preallocated file, read and written past the page cache by a few threads of its own.

Nobody maps it: the node reads a slot into page-aligned memory and sends it. Where the file system refuses direct I/O,
the file is read and written through the page cache, which is logged and counted; a scrub then drops the pages first.
"""

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvpool.core.directory import DISK
from kvpool.core.errors import CapacityError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import format_size
from kvpool.node.private_file import open_private
from kvpool.node.segment.base import Extent, aligned
from kvpool.ops.logging import get_logger
from kvpool.transport.blocks import Bytes, rest_of

THREADS = 4
"""Requests that the disk has at a time from one node."""

RUN_BYTES = 4 << 20
"""Neighbouring slots are read or written together up to this."""

PIECES_MAX = 512
"""Buffers of one request; the kernel takes 1,024."""

_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

log = get_logger(__name__)


class DiskSegment:
    """A payload file; see `Segment`. Thread-safe.

    Args:
        path: The file; made when absent, taken over as it is when it has the right size.
        segment_id: Its identity.
        size_bytes: Rounded down to whole pages.

    Attributes:
        direct: Whether it goes past the page cache.

    Raises:
        CapacityError: The disk has not that much room, or fails.
    """

    medium = DISK

    def __init__(self, path: Path, segment_id: bytes, size_bytes: int) -> None:
        self.path = path
        self.where = str(path)
        self.segment_id = segment_id
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.payload: Bytes = np.empty(0, np.uint8)
        _allocate(path, self.size_bytes)
        self._descriptor, self.direct = _open(path)
        if not self.direct:
            log.warning("disk_not_direct", path=str(path), reason="the file system refuses O_DIRECT")
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-disk")

    def descriptors(self) -> tuple[int, int]:
        """Raises UsageError: nobody maps a disk."""
        raise UsageError(f"segment {self.segment_id.hex()} is on disk, and cannot be mapped; read it over the socket")

    def view(self, page: int, length: int) -> memoryview:
        """One slot's bytes as the medium has them now; raises OSError."""
        memory = aligned(length)
        if not self.direct:
            os.posix_fadvise(self._descriptor, page * PAGE_BYTES, len(memory), os.POSIX_FADV_DONTNEED)
        [error] = self.read([(page, memory)])
        if error is not None:
            raise error
        return memory[:length]

    def buffer(self, size_bytes: int) -> memoryview:
        """See `FetchedSegment.buffer`."""
        return aligned(size_bytes)

    def read(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """See `FetchedSegment.read`."""
        return self._transfer(extents, _read_whole)

    def write(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """See `FetchedSegment.write`."""
        return self._transfer(extents, _write_whole)

    def close(self) -> None:
        """See `Segment.close`; waits for what the disk is at."""
        self._threads.shutdown()
        os.close(self._descriptor)

    def _transfer(self, extents: Sequence[Extent], move: "Move") -> list[OSError | None]:
        runs = _runs(extents)
        begun = [(run, self._begin(move, run)) for run in runs]
        errors: list[OSError | None] = []
        for run, future in begun:
            error = future.exception()
            if error is None:
                errors += [None] * len(run)
            elif len(run) == 1 or not isinstance(error, OSError):
                errors += [error if isinstance(error, OSError) else OSError(str(error))] * len(run)
            else:  # which of them it was
                errors += [self._begin(move, [extent]).exception() for extent in run]  # type: ignore[misc]
        return errors

    def _begin(self, move: "Move", run: Sequence[Extent]) -> "Future[None]":
        try:
            return self._threads.submit(move, self._descriptor, [memory for _, memory in run], run[0][0] * PAGE_BYTES)
        except RuntimeError as error:  # what an executor says after its shutdown
            raise UsageError(f"segment {self.segment_id.hex()} was closed") from error


Move = Callable[[int, list[memoryview], int], None]


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, and whether it is for direct I/O."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise CapacityError(f"cannot use {path}: {error}; choose another --disk") from error
        return os.open(path, flags), False
    try:
        os.preadv(descriptor, [aligned(PAGE_BYTES)], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _UNSUPPORTED:
            raise CapacityError(f"cannot read {path}: {error}; choose another --disk, or none") from error
        return os.open(path, flags), False
    return descriptor, True


def _allocate(path: Path, size_bytes: int) -> None:
    descriptor = open_private(path, "a segment")
    try:
        if os.fstat(descriptor).st_size != size_bytes:
            os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CapacityError(
            f"{path.parent} gave no {format_size(size_bytes)}: {error}; choose a smaller --disk-size"
        ) from error
    finally:
        os.close(descriptor)


def _runs(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Extents in their order, those together that lie side by side on disk."""
    runs: list[list[Extent]] = []
    end, size_bytes = -1, 0
    for page, memory in extents:
        if page != end or size_bytes + len(memory) > RUN_BYTES or len(runs[-1]) == PIECES_MAX:
            runs.append([])
            size_bytes = 0
        runs[-1].append((page, memory))
        end, size_bytes = page + len(memory) // PAGE_BYTES, size_bytes + len(memory)
    return runs


def _read_whole(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    _move_whole(os.preadv, descriptor, pieces, offset)


def _write_whole(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    _move_whole(os.pwritev, descriptor, pieces, offset)


def _move_whole(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, pieces: list[memoryview], offset: int
) -> None:
    """Move all pieces; a call may stop early, but on a page, and where the file has been cut short there is nothing."""
    left = sum(len(piece) for piece in pieces)
    while left:
        moved = call(descriptor, pieces, offset)
        if not moved or (moved < left and moved % PAGE_BYTES):
            raise OSError(errno.EIO, f"{moved} of {left} bytes at {offset}: the file is not what it was")
        left, offset = left - moved, offset + moved
        if left:
            pieces = rest_of(pieces, moved)
