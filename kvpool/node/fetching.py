"""A store whose medium the processor cannot address, such as a disk or the memory of a GPU.

The slots, headers and rules of writing are the same; bytes are fetched into host memory, and written from there.

When the medium fails it is turned off: it takes and serves nothing more until the node restarts, and the directory
forgets what lay there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import ProtocolError, UnavailableError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import Slots
from kvpool.core.units import pages_of
from kvpool.node.directory_link import DirectoryLink
from kvpool.node.headers import HeaderFile, SlotHeaders
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.records import Reading, Receiving
from kvpool.node.segment import FetchedSegment, aligned
from kvpool.node.store import NodeStore
from kvpool.ops.logging import get_logger
from kvpool.transport.blocks import Bytes

READ_BYTES_MAX = 64 << 20
"""Bytes of one read, or one block if that is larger."""

READS_MAX = 4
"""Reads that hold memory at a time, from the medium until they are sent: with the limit above, all that reads take."""

READ_WAIT_S = 5.0
"""How long a read waits for its turn."""

READ_ERRORS_MAX = 3
"""Blocks that could not be read until the medium counts as broken; one that could not be written is enough."""

log = get_logger(__name__)


class FetchingStore(NodeStore):
    """One fetched segment and everything in it; see `NodeStore`. Thread-safe."""

    segment: FetchedSegment

    def __init__(
        self,
        segment: FetchedSegment,
        headers: HeaderFile,
        slots: Slots,
        book: NamespaceBook,
        link: DirectoryLink,
        incarnation: int,
    ) -> None:
        super().__init__(segment, headers, slots, book, link, incarnation)
        self.on_off: Callable[[], None] = lambda: None
        """Called once, when it is turned off."""
        self._turns = threading.BoundedSemaphore(READS_MAX)
        self._memory: list[memoryview] = []

    def turn_off(self, error: Exception, doing: str) -> None:
        """The medium failed at ``doing``."""
        with self._lock:
            if self.off:
                return
            self.off = f"{doing}: {error}"
            self._counters["turned_off"] += 1
            self.checks.stop()
        where = {"medium": self.segment.medium, "where": self.segment.where}
        log.error("medium_off", **where, reason=self.off, until="the node restarts")
        self.on_off()

    def prepare(
        self, sealed: bytes, owner: int, *, bound: bool = True
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """See `NodeStore.prepare`; UnavailableError too when the medium is off."""
        if self.off:
            raise UnavailableError(f"the {self.segment.medium} is off: {self.off}")
        return super().prepare(sealed, owner, bound=bound)

    def end_receive(self, received: list[tuple[Receiving, bool]]) -> None:
        """See `NodeStore.end_receive`; what is sound is in its slot when this returns, or it is sound no more."""
        arrived = [receiving for receiving, sound in received if sound]
        errors = self.segment.write([(r.slot.page, memoryview(r.view.obj)) for r in arrived]) if not self.off else []
        written = {r.slot.page for r, error in zip(arrived, errors, strict=False) if error is None}
        super().end_receive([(r, sound and r.slot.page in written) for r, sound in received])
        for error in errors:
            if error is not None:
                self.turn_off(error, "write")

    def payload(self, segment_id: bytes) -> Bytes | None:
        """See `NodeStore.payload`."""
        self.check_segment(segment_id)
        return None

    @contextmanager
    def read(
        self, slots: list[int], generations: list[int], length: int, namespace: bytes | None = None
    ) -> Iterator[Reading]:
        """See `NodeStore.read`; UnavailableError when too many are at it."""
        if length * len(slots) > max(READ_BYTES_MAX, length):
            raise ProtocolError(f"a read of {len(slots)} blocks of {length} bytes; {READ_BYTES_MAX} bytes at a time")
        if not self._turns.acquire(timeout=READ_WAIT_S):
            raise UnavailableError(f"the {self.segment.medium} has too much to do; compute the blocks, or try again")
        named = list(zip(slots, generations, strict=True))
        pinned: list[tuple[int, int]] = []
        try:
            memory = self._take_memory(len(slots) * pages_of(length) * PAGE_BYTES)
            try:
                found = [not self.off and self._pin(*name, length, namespace) for name in named]
                pinned = [name for name, there in zip(named, found, strict=True) if there]
                views = iter(self._fetch(pinned, memory, length))
                read = [next(views) if there else None for there in found]
                yield Reading(bytearray(view is not None for view in read), [view for view in read if view is not None])
            finally:
                self.unpin(pinned)
                self._memory.append(memory)
        finally:
            self._turns.release()

    def read_failed(self, error: OSError, headers: SlotHeaders) -> None:
        """A block could not be read: it is gone, and when that happens again and again, the medium is off."""
        with self._lock:
            self._counters["read_errors"] += 1
            errors = self._counters["read_errors"]
        log.error("read_failed", medium=self.segment.medium, slot=int(headers.pages[0]), error=str(error))
        if errors >= READ_ERRORS_MAX:
            self.turn_off(error, "read")

    def _take_memory(self, size_bytes: int) -> memoryview:
        """Memory of one of the readers before, if it is enough: the first touch of fresh pages takes as long as a read.

        There is never more of it than readers have their turns.
        """
        memory = self._memory.pop() if self._memory else memoryview(b"")
        return memory if len(memory) >= size_bytes else self.segment.buffer(size_bytes)

    def _fetch(self, pinned: list[tuple[int, int]], memory: memoryview, length: int) -> list[memoryview | None]:
        """The bytes of pinned slots, read into ``memory`` side by side; None for one that cannot be read."""
        step = pages_of(length) * PAGE_BYTES
        extents = [(page, memory[i * step : (i + 1) * step]) for i, (page, _) in enumerate(pinned)]
        errors = self.segment.read(extents)
        for name, error in zip(pinned, errors, strict=True):
            if error is not None:
                self.checks.cannot_be_read(*name, error)
        return [None if error else view[:length] for (_, view), error in zip(extents, errors, strict=True)]

    def _view(self, page: int, length: int) -> memoryview:  # noqa: ARG002 - where it goes is known at the end
        """Memory to receive a slot's bytes into; `end_receive` writes it."""
        return aligned(length)[:length]
