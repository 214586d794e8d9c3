"""What every kind of segment offers the node."""

import mmap
from collections.abc import Sequence
from typing import Protocol

from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import pages_of
from kvpool.transport.blocks import Bytes

Extent = tuple[int, memoryview]
"""First page, and host memory of whole pages."""


def aligned(length: int) -> memoryview:
    """Page-aligned memory of as many whole pages as ``length`` bytes need; zeros."""
    return memoryview(mmap.mmap(-1, pages_of(length) * PAGE_BYTES))


class Segment(Protocol):
    """Payload memory divided into pages. Owns its memory until `close`.

    Attributes:
        segment_id: 16 bytes that stay with the memory over restarts; slots are named by it.
        medium: ``shm``, ``vram`` or ``disk``.
        size_bytes: Whole pages.
        payload: All bytes, writable; none of a segment that is not host memory.
    """

    segment_id: bytes
    medium: str
    size_bytes: int
    payload: Bytes

    def view(self, page: int, length: int) -> memoryview:
        """A slot's bytes from the medium itself, past all caches: the scrub believes them. Raises OSError."""

    def descriptors(self) -> tuple[int, int]:
        """File descriptors of the payload, read-only and read-write; they stay the segment's."""

    def close(self) -> None:
        """Let go of the memory; files stay, so that a restart can find the blocks again."""


class FetchedSegment(Segment, Protocol):
    """A segment that is not host memory: its bytes are fetched there, and written back.

    Attributes:
        where: What it lies on, for the log.
    """

    where: str

    def buffer(self, size_bytes: int) -> memoryview:
        """Host memory of as many whole pages as ``size_bytes`` need, to read into and write from; the caller's."""

    def read(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """Fill the memory of each from its pages; what went wrong with each, or None."""

    def write(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """Write the memory of each to its pages; what went wrong with each, or None."""
