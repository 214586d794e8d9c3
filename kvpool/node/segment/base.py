"""What every kind of segment offers the node."""

from typing import Protocol

from kvpool.transport.blocks import Bytes


class Segment(Protocol):
    """Payload memory divided into pages. Owns its memory until `close`.

    Attributes:
        segment_id: 16 bytes that stay with the memory over restarts; slots are named by it.
        medium: ``shm`` or ``disk``, later ``vram``.
        size_bytes: Whole pages.
        payload: All bytes, writable; none of a segment that is not memory.
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
