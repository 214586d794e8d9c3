"""Page-locks mapped segments, once and in the background: only from such memory does a GPU copy at full speed.

A mapping is locked piece by piece: 0.03 to 0.07 s/GiB (measured), and whatever the process launches on the GPU waits
for the piece at hand. Until it is done copies are right but slow (8 against 55 GB/s), and hold up their thread.
"""

import logging
import threading
import time
import weakref
from contextlib import suppress

import cupy

from kvpool.transport.blocks import Bytes

PIECE_BYTES = 32 << 20
"""Locked in one call: 1 to 2 ms. A copy must not cross from one piece into the next: CUDA refuses it."""

_WRITABLE = 0
_READ_ONLY = 8

log = logging.getLogger("kvpool.gpu")


class PinnedMapping:
    """One mapping that is, or is being, page-locked; it is unlocked when the mapping is dropped.

    Args:
        mapping: All of it. Only a weak reference is kept.
        device: The GPU whose context locks it; the lock holds for all.
    """

    def __init__(self, mapping: Bytes, device: int) -> None:
        self.origin: int = mapping.ctypes.data
        self._size_bytes = len(mapping)
        self._flags = _WRITABLE if mapping.flags.writeable else _READ_ONLY
        self._device = device
        self._locked: list[int] = []
        self._stopping = threading.Event()
        self._done = threading.Event()
        self.complete = False
        self._thread = threading.Thread(target=self._run, name="kvpool-pin", daemon=True)
        weakref.finalize(mapping, self._release).atexit = False  # a process that ends unlocks all it has
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done or has failed; whether all is page-locked."""
        self._done.wait(timeout_s)
        return self.complete

    def _run(self) -> None:
        try:
            with cupy.cuda.Device(self._device):
                for start in range(0, self._size_bytes, PIECE_BYTES):
                    if self._stopping.is_set():
                        return
                    size_bytes = min(PIECE_BYTES, self._size_bytes - start)
                    cupy.cuda.runtime.hostRegister(self.origin + start, size_bytes, self._flags)
                    self._locked.append(self.origin + start)
            self.complete = True
        except cupy.cuda.runtime.CUDARuntimeError as error:
            log.warning("shared memory cannot be page-locked, GPU copies stay slow: %s", error)
        finally:
            self._done.set()

    def _release(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.complete = False
        for address in self._locked:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.hostUnregister(address)
        with _lock:
            _mappings.pop((self.origin, self._size_bytes), None)


_mappings: dict[tuple[int, int], PinnedMapping] = {}
_lock = threading.RLock()  # a mapping may be dropped, and so released, by the thread that holds it


def pinned(mapping: Bytes, device: int) -> PinnedMapping:
    """The page-locking of ``mapping``, begun now if it was not before."""
    key = (mapping.ctypes.data, len(mapping))
    with _lock:
        found = _mappings.get(key)
        if found is None:
            found = _mappings[key] = PinnedMapping(mapping, device)
        return found


def wait_pinned(timeout_s: float) -> bool:
    """Wait until every mapping met so far is page-locked; whether all are."""
    deadline_s = time.monotonic() + timeout_s
    with _lock:
        known = list(_mappings.values())
    return all(mapping.wait(max(0.0, deadline_s - time.monotonic())) for mapping in known)
