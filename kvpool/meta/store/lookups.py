"""What one service was asked, and the sums that it shows of a pool."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from kvpool.core.directory import DirectoryStats, LookupStats, MissReason, Segment
from kvpool.core.directory.directory import COUNTS
from kvpool.meta.store.usage import NamespaceStats


class Lookups:
    """Look-ups that came to this service, since its start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[MissReason] = Counter()
        self._asked: Counter[bytes] = Counter()
        self._matched: Counter[bytes] = Counter()
        self._moved: dict[str, Counter[bytes]] = {"read": Counter(), "stored": Counter()}
        self.lookups = 0
        self.shortened = 0

    def note(
        self, namespace_id: bytes, asked: int, matched: int, reason: MissReason | None, *, shortened: bool
    ) -> None:
        """Count one."""
        with self._lock:
            self.lookups += 1
            self.shortened += shortened
            self._asked[namespace_id] += asked
            self._matched[namespace_id] += matched
            if reason is not None:
                self._misses[reason] += 1

    def moved(self, way: str, namespace_id: bytes, size_bytes: int) -> None:
        """Count bytes that readers were told where to find (``read``), or that writers committed (``stored``)."""
        with self._lock:
            self._moved[way][namespace_id] += size_bytes

    def of(self, namespace_id: bytes) -> tuple[int, int, int, int]:
        """Of one namespace: blocks asked for, of these matched; bytes read, bytes stored."""
        with self._lock:
            sums = (self._asked, self._matched, self._moved["read"], self._moved["stored"])
            asked, matched, read_bytes, stored_bytes = (counter[namespace_id] for counter in sums)
            return asked, matched, read_bytes, stored_bytes

    @property
    def blocks(self) -> tuple[int, int]:
        """(asked for, matched)."""
        with self._lock:
            return self._asked.total(), self._matched.total()

    def stats(self, block_tokens: Mapping[bytes, int]) -> LookupStats:
        """All of them, in tokens."""
        with self._lock:
            return LookupStats(
                asked_tokens=sum(count * block_tokens[n] for n, count in self._asked.items()),
                matched_tokens=sum(count * block_tokens[n] for n, count in self._matched.items()),
                misses={reason: self._misses[reason] for reason in MissReason},
            )


def pool_stats(
    every: Sequence[NamespaceStats], segments: Sequence[Segment], lookups: Lookups, orders_pending: int
) -> DirectoryStats:
    """Counts and bytes of all namespaces; look-ups are those of one service."""
    counts: Counter[str] = Counter(lookups=lookups.lookups, matches_shortened=lookups.shortened)
    for stats in every:
        counts.update(stats.counts)
    asked, matched = lookups.blocks
    return DirectoryStats(
        namespaces=len(every),
        blocks=sum(stats.blocks for stats in every),
        capacity_bytes=sum(segment.capacity_bytes for segment in segments),
        used_bytes=sum(segment.used_bytes for segment in segments),
        disk_capacity_bytes=0,
        disk_used_bytes=0,
        reservations=sum(stats.reservations for stats in every),
        leases=sum(stats.leases for stats in every),
        leased_bytes=sum(stats.leased_bytes for stats in every),
        orders_pending=orders_pending,
        surplus_blocks=0,
        surplus_bytes=0,
        copies=0,
        blocks_asked=asked,
        blocks_matched=matched,
        **{name: counts[name] for name in COUNTS},
    )
