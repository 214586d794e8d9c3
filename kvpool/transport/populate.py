"""Fills a mapping's page tables ahead of use, in the background, so that copies do not stop at every page.

A first touch costs 0.1 to 0.25 s/GiB once the pages exist, and 1.6 s/GiB when the kernel must clear them first (4 KiB
pages, measured): too long for the call that attaches, too much to leave to the copies.
"""

import contextlib
import ctypes
import os
import threading

from kvpool.transport.blocks import Bytes

CHUNK_BYTES = 16 << 20
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, releases the interpreter lock


class Populator:
    """Populates ``mapped`` on a thread of the lowest priority, until it is done or stopped.

    Args:
        mapped: All of a mapping; the thread keeps it alive while it runs.
        writable: Whether it will be written.
    """

    def __init__(self, mapped: Bytes, *, writable: bool) -> None:
        self._advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(mapped,), name="kvpool-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop early, and wait for the chunk at hand."""
        self._stopping.set()
        self._thread.join()

    def _run(self, mapped: Bytes) -> None:
        with contextlib.suppress(OSError):  # not allowed to lower its priority: then not
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        address = mapped.ctypes.data
        for start in range(0, len(mapped), CHUNK_BYTES):
            size_bytes = min(CHUNK_BYTES, len(mapped) - start)
            failed = _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size_bytes), self._advice)
            if failed or self._stopping.is_set():
                return  # a kernel before 5.14: pages come by faults
