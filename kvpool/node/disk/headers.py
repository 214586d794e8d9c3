"""Slot headers on disk: kept in memory of the process's own, and written behind by a thread.

The file is not mapped, as the one of shared memory is: a page of a mapping that the disk fails to bring is the end of
the process, and whoever changes a header, with a lock in hand, would wait for the disk. A crash loses what the thread
has not written yet: then a header tells of bytes that are not there, and whoever reads them compares their checksum.
"""

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvpool.node.headers import GENERATIONS_RESERVED, PROLOGUE, PROLOGUE_BYTES, RECORD_BYTES, HeaderFile

READ_BYTES = 1 << 20


class DiskHeaders(HeaderFile):
    """See `HeaderFile`; what it changes reaches the file a moment later, and all of it by the end of `close`.

    Args:
        path: As there.
        segment_id: As there.
        pages: As there.
        on_error: Called, on the writing thread, when the disk takes no more; nothing is written after that.

    Attributes:
        error: Why not, then.
    """

    def __init__(self, path: Path, segment_id: bytes, pages: int, on_error: Callable[[OSError], None]) -> None:
        self._on_error = on_error
        self._dirty: set[int] = set()
        self._wake = threading.Condition()
        self._closing = False
        self.error: OSError | None = None
        super().__init__(path, segment_id, pages)
        self._thread = threading.Thread(target=self._run, name="kvpool-disk-headers", daemon=True)
        self._thread.start()

    def reserve_generations(self, next_generation: int) -> None:
        """See `HeaderFile`; half of them ahead of need, so that they are in the file by then."""
        super().reserve_generations(next_generation + GENERATIONS_RESERVED // 2)

    def close(self) -> None:
        """Write what is left, unless the disk has failed, and let go of the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        super().close()

    def _mapped(self, size_bytes: int) -> mmap.mmap:
        """Private memory with what the file holds; pages that are empty there take none here."""
        memory = mmap.mmap(-1, size_bytes)
        view, offset = memoryview(memory), 0
        while offset < size_bytes:
            part = os.pread(self._descriptor, READ_BYTES, offset)
            if not part:
                break
            if np.frombuffer(part, np.uint8).any():
                view[offset : offset + len(part)] = part
            offset += len(part)
        view.release()
        return memory

    def _changed(self, pages: Sequence[int]) -> None:
        with self._wake:
            if self.error is None:
                self._dirty.update(pages)
                self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._dirty or self._closing)
                dirty, self._dirty = sorted(self._dirty), set()
            if not dirty:
                return
            try:
                for page in dirty:
                    self._write(page)
            except OSError as error:
                with self._wake:
                    self.error = error
                    self._dirty.clear()
                self._on_error(error)

    def _write(self, page: int) -> None:
        start, size_bytes = (
            (0, PROLOGUE_BYTES) if page == PROLOGUE else (PROLOGUE_BYTES + page * RECORD_BYTES, RECORD_BYTES)
        )
        if os.pwrite(self._descriptor, self._map[start : start + size_bytes], start) != size_bytes:
            raise OSError("a short write of a slot header")
