"""The client's counts. Thread-safe."""

import threading
from collections import Counter
from collections.abc import Iterable

from kvpool.core.directory import MissReason
from kvpool.ops.metrics import latencies

STEPS = ("match", "locate", "reserve", "read", "write")
"""Whose times are counted. Reading includes the comparison with the checksum, writing the node's commit."""


class Counters:
    """What `ClientStats` is read from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.times = latencies(STEPS)
        self.loaded_bytes: Counter[str] = Counter()
        self.stored_bytes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.verify_failures = 0
        self.stores_refused = 0

    def loaded(self, transport: str, size_bytes: int) -> None:
        """Verified bytes came over ``transport``."""
        with self._lock:
            self.loaded_bytes[transport] += size_bytes

    def stored(self, transport: str, size_bytes: int) -> None:
        """Bytes went over ``transport`` and were committed."""
        with self._lock:
            self.stored_bytes[transport] += size_bytes

    def missed(self, reasons: Iterable[MissReason | None]) -> None:
        """Blocks were not loaded."""
        with self._lock:
            self.misses.update(reason for reason in reasons if reason is not None)

    def unverified(self, blocks: int) -> None:
        """Blocks arrived with wrong bytes."""
        with self._lock:
            self.verify_failures += blocks

    def refused(self, blocks: int) -> None:
        """Blocks could not be stored."""
        with self._lock:
            self.stores_refused += blocks
