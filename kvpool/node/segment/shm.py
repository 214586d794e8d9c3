"""`shm`: payload bytes in a file of shared memory that clients on the same host map.

All pages are allocated when the segment is made: a node that starts has its memory, and cannot be killed later by a
page that is not there. Huge pages are asked for where the system offers them for shared memory.
"""

import contextlib
import mmap
import os
from pathlib import Path
from typing import Literal

import numpy as np

from kvpool.core.directory import SHM
from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import format_size
from kvpool.node.private_file import open_private
from kvpool.ops.logging import get_logger
from kvpool.transport.blocks import Bytes
from kvpool.transport.populate import Populator

HUGE_PAGES_STATE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

NO_ROOM = "choose a smaller --size or enlarge it (docker: --shm-size, mount: -o remount,size=)"

HugePages = Literal["auto", "off", "require"]

log = get_logger(__name__)


class ShmSegment:
    """A payload file under ``directory``; see `Segment`.

    Args:
        path: The payload file; made when absent, taken over as it is when it has the right size.
        segment_id: Its identity.
        size_bytes: Rounded down to whole pages.
        hugepages: ``require`` fails where there are none; ``auto`` does without.

    Raises:
        CapacityError: Shared memory has not that much room, or huge pages are required and not offered.
    """

    medium = SHM

    def __init__(self, path: Path, segment_id: bytes, size_bytes: int, hugepages: HugePages = "auto") -> None:
        self.path = path
        self.segment_id = segment_id
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        if not self.size_bytes:
            raise CapacityError(f"a segment of {size_bytes} bytes holds no page of {PAGE_BYTES}; give a larger size")
        check_room(path, self.size_bytes, NO_ROOM)
        want_huge = _huge_offered(required=hugepages == "require") and hugepages != "off"
        self._write_descriptor = open_private(path, "a segment")
        try:
            _allocate(self._write_descriptor, path, self.size_bytes)
            self._mapping = mmap.mmap(self._write_descriptor, self.size_bytes)
            self.huge = want_huge and _advise_huge(self._mapping)
            self._read_descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._write_descriptor)
            raise
        self.payload: Bytes = np.frombuffer(self._mapping, np.uint8)
        self._populator = Populator(self.payload, writable=True)

    def view(self, page: int, length: int) -> memoryview:
        """See `Segment.view`: the memory itself."""
        return self.payload[page * PAGE_BYTES : page * PAGE_BYTES + length].data

    def descriptors(self) -> tuple[int, int]:
        """See `Segment.descriptors`."""
        return self._read_descriptor, self._write_descriptor

    def close(self) -> None:
        """See `Segment.close`."""
        self._populator.stop()
        os.close(self._read_descriptor)
        os.close(self._write_descriptor)
        self.payload = np.empty(0, np.uint8)
        # Views of a transfer that is ending keep the mapping until they go.
        with contextlib.suppress(BufferError):
            self._mapping.close()


def check_room(path: Path, size_bytes: int, fix: str, beside_bytes: int = 0) -> None:
    """Raise CapacityError unless ``size_bytes`` fit at ``path``, in place of what is there, and others beside it."""
    try:
        room = os.statvfs(path.parent)
    except OSError as error:
        raise CapacityError(f"cannot keep a segment in {path}: {error}; choose another segment_dir") from error
    taken_bytes = path.stat().st_blocks * 512 if path.exists() else 0
    free_bytes = room.f_bavail * room.f_frsize + taken_bytes
    if size_bytes + beside_bytes > free_bytes:
        beside = f" with {format_size(beside_bytes)} of headers" if beside_bytes else ""
        raise CapacityError(
            f"a segment of {format_size(size_bytes)}{beside} does not fit {path.parent}, which has "
            f"{format_size(free_bytes)} free; {fix}"
        )


def _allocate(descriptor: int, path: Path, size_bytes: int) -> None:
    if os.fstat(descriptor).st_size != size_bytes:
        os.ftruncate(descriptor, size_bytes)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CapacityError(
            f"{path.parent} gave no {format_size(size_bytes)}: {error}; choose a smaller --size"
        ) from error


def _huge_offered(*, required: bool) -> bool:
    """Whether the system offers huge pages for shared memory; CapacityError if not, and they are required."""
    state = HUGE_PAGES_STATE.read_text() if HUGE_PAGES_STATE.exists() else "[never]"
    offered = not any(word in state for word in ("[never]", "[deny]"))
    if required and not offered:
        raise CapacityError(
            f"huge pages for shared memory are off ({state.strip()}); write 'advise' to {HUGE_PAGES_STATE} "
            "or set hugepages to auto"
        )
    return offered


def _advise_huge(mapping: mmap.mmap) -> bool:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.info("huge_pages_refused", error=str(error))
        return False
    return True
