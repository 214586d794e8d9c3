"""A client's region: memory that UCX may touch, lent to one transfer at a time.

Bytes pass through it so that UCX never holds the caller's own memory: a read that comes too late lands here, not in
pages that the engine has long given to somebody else; and a node that reads a writer's bytes sees nothing but them.
"""

import mmap
import os
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import ClosedError, DeadlineError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slab import Slab
from kvpool.transport.blocks import Bytes
from kvpool.transport.deadline import Deadline

REGION_BYTES = 64 << 20
LEASE_BYTES_MAX = 4 << 20
"""What one transfer moves: enough that its own cost disappears, little enough to be warm in the cache when verified."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Room for some blocks, side by side; ``slots`` are their first pages in the region."""

    slots: NDArray[np.uint32]
    pages: int


class Arena:
    """The region. Thread-safe; owns its memory until `close`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvpool-ucx")
        os.ftruncate(self.descriptor, REGION_BYTES)
        self.payload: Bytes = np.frombuffer(mmap.mmap(self.descriptor, REGION_BYTES), np.uint8)
        self._slab = Slab(REGION_BYTES // PAGE_BYTES)
        self._freed = threading.Condition()
        self._closed = False

    def lease(self, blocks: int, pages_each: int, deadline: Deadline) -> Lease:
        """Room for ``blocks`` blocks, until `release`; waits for it. Raises DeadlineError when none comes free."""
        pages = blocks * pages_each
        with self._freed:
            while (start := self._slab.allocate(pages)) is None:
                if not self._freed.wait(deadline.left_s()):
                    raise DeadlineError("all memory for UCX transfers is in use")
                if self._closed:
                    raise ClosedError("the transport was closed")
        return Lease(np.arange(start, start + pages, pages_each, dtype=np.uint32), pages)

    def release(self, lease: Lease) -> None:
        """Give a lease back: nothing of its transfer reads or writes it any more."""
        with self._freed:
            self._slab.free(int(lease.slots[0]), lease.pages)
            self._freed.notify_all()

    @property
    def leased_bytes(self) -> int:
        """Bytes lent now."""
        return (self._slab.pages - self._slab.free_pages) * PAGE_BYTES

    def close(self) -> None:
        """Those that wait for memory get ClosedError; it goes with the last copy out of it."""
        with self._freed:
            self._closed = True
            self._freed.notify_all()
        os.close(self.descriptor)
