"""`vram`: payload bytes in the memory of a GPU. They are gone when the process ends.

Clients with a GPU map the memory itself; for all others the node copies a slot into host memory and sends that.
"""

from collections.abc import Sequence

import numpy as np

from kvpool.core.directory import VRAM
from kvpool.core.errors import UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.node.segment.base import Extent
from kvpool.transport.blocks import Bytes
from kvpool.transport.devices import OwnMemory


class VramSegment:
    """A device's memory; see `FetchedSegment`. Thread-safe.

    Args:
        segment_id: Its identity, never that of an earlier process.
        size_bytes: Whole pages.
        memory: As many bytes; the segment's from now on.
    """

    medium = VRAM

    def __init__(self, segment_id: bytes, size_bytes: int, memory: OwnMemory) -> None:
        self.segment_id = segment_id
        self.size_bytes = size_bytes
        self.memory = memory
        self.where = memory.name
        self.payload: Bytes = np.empty(0, np.uint8)

    def descriptors(self) -> tuple[int, int]:
        """Raises UsageError: it is no file."""
        raise UsageError(f"segment {self.segment_id.hex()} is on a GPU, and is no file; read it over the socket")

    def view(self, page: int, length: int) -> memoryview:
        """See `Segment.view`: a copy of the slot's bytes."""
        view = self.buffer(length)[:length]
        self.memory.read([(page * PAGE_BYTES, view)])
        return view

    def buffer(self, size_bytes: int) -> memoryview:
        """See `FetchedSegment.buffer`."""
        return self.memory.buffer(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES)

    def read(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """See `FetchedSegment.read`: where a device fails once, nothing of it is believed."""
        try:
            self.memory.read([(page * PAGE_BYTES, view) for page, view in extents])
        except OSError as error:
            return [error] * len(extents)
        return [None] * len(extents)

    def write(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """See `FetchedSegment.write`; as `read`."""
        try:
            self.memory.write([(page * PAGE_BYTES, view) for page, view in extents])
        except OSError as error:
            return [error] * len(extents)
        return [None] * len(extents)

    def close(self) -> None:
        """See `Segment.close`; nothing stays."""
        self.memory.close()
