"""What every kind of segment offers the node."""

from typing import Protocol

from kvpool.transport.blocks import Bytes


class Segment(Protocol):
    """Payload memory divided into pages. Owns its memory until `close`.

    Attributes:
        segment_id: 16 bytes that stay with the memory over restarts; slots are named by it.
        medium: ``shm``, later ``vram`` or ``disk``.
        size_bytes: Whole pages.
        payload: All bytes, writable. What is read here is read from the medium itself, since the scrub believes it: a
            segment on disk must go past the page cache (O_DIRECT) for that.
    """

    segment_id: bytes
    medium: str
    size_bytes: int
    payload: Bytes

    def descriptors(self) -> tuple[int, int]:
        """File descriptors of the payload, read-only and read-write; they stay the segment's."""

    def close(self) -> None:
        """Let go of the memory; files stay, so that a restart can find the blocks again."""
