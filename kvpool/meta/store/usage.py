"""How full the segments are, summed up over namespaces, and who gives way when they are full."""

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvpool.core.directory import DirectoryConfig, FreeSlot, Segment
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import pages_of
from kvpool.meta.store import packing
from kvpool.meta.store.pool import Known, Pool, SegmentRecord

ROUNDS_MAX = 64
"""Namespaces asked to make room in one reservation."""

PRESSURE_S = 0.1

NONE = (2, 0)
"""The age of what has no leaf to give."""

NEWEST = (1, 1 << 52)


Freed = tuple[int, list[FreeSlot]]
"""Orders to free slots of one segment, by its number."""


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace's counts; ``used`` are the blocks it has on each segment."""

    slot_bytes: int
    blocks: int
    reservations: int
    leases: int
    leased_bytes: int
    tombs: int
    counts: Counter[str]
    used: dict[int, int]


class Usage:
    """Sums over the namespaces of a pool, of the moment they are asked for.

    Attributes:
        pressure_s: For how long it is taken as known whether the pool is nearly full: each lease asks.
    """

    def __init__(self, pool: Pool) -> None:
        self.pressure_s = PRESSURE_S
        self._pool = pool
        self._lease_share = (-math.inf, 0.0)

    def stats(self) -> list[NamespaceStats]:
        """Of every namespace."""
        self._pool.read_namespaces()
        return self._stats(self._pool.all_known())

    def stats_of(self, wanted: list[Known]) -> list[NamespaceStats]:
        """Of these namespaces, in their order."""
        return self._stats(wanted)

    def blocks(self, number: int) -> int:
        """Placements on a segment."""
        return sum(stats.used.get(number, 0) for stats in self.stats())

    def segments(self) -> list[Segment]:
        """The open segments, with their use."""
        every, records = self.stats(), self._pool.segments()
        return [_segment(number, record, every) for number, record in records.items() if record.open]

    def choices(self, namespace_id: bytes, records: dict[int, SegmentRecord]) -> bytes:
        """The segments that blocks of a namespace may be placed on, packed for its functions."""
        others: Counter[int] = Counter()
        for stats in self._stats([known for known in self._all() if known.namespace.id != namespace_id]):
            for number, blocks in stats.used.items():
                others[number] += blocks * stats.slot_bytes
        return b"".join(
            packing.pack_choice(n, _capacity_bytes(r), others[n], r.segment_id, takes_new=r.accepts)
            for n, r in records.items()
        )

    def lease_share(self, config: DirectoryConfig) -> float:
        """What leases may hold of what each namespace uses; negative while there is no pressure on the pool."""
        asked_s, share = self._lease_share
        now_s = time.monotonic()
        if now_s >= asked_s + self.pressure_s:
            share = self._share(config)
            self._lease_share = (now_s, share)
        return share

    def make_room(self, known: Known, records: dict[int, SegmentRecord], hashes: bytes, first: int) -> list[Freed]:
        """Let namespaces with older leaves than this one's give way to the blocks it lacks; what they freed.

        What its own leaves have to give is for its reservation itself to take: it knows which it must keep.
        """
        everyone = self._all()
        if len(everyone) < 2:
            return []
        lack = self._call(known, "lacking", hashes, first) * known.namespace.shards
        return self._evict(known, records, everyone, lack - self._free_slots(known, records), spare_own=False)

    def let_others_give(self, known: Known, records: dict[int, SegmentRecord], blocks: int) -> list[Freed]:
        """Let other namespaces give way to so many blocks, though their leaves be younger: its own are not enough."""
        return self._evict(known, records, self._all(), blocks * known.namespace.shards, spare_own=True)

    def _share(self, config: DirectoryConfig) -> float:
        segments = self.segments()
        capacity_bytes = sum(segment.capacity_bytes for segment in segments)
        used_bytes = sum(segment.used_bytes for segment in segments)
        if used_bytes <= config.pressure * capacity_bytes:
            return -1.0
        return config.lease_cap * capacity_bytes / used_bytes

    def _evict(
        self, known: Known, records: dict[int, SegmentRecord], everyone: list[Known], slots: int, *, spare_own: bool
    ) -> list[Freed]:
        """The oldest leaves of all namespaces go, one namespace at a time, up to the bytes of ``slots``."""
        freed: list[Freed] = []
        need_bytes = slots * _slot_bytes(known)
        for _ in range(ROUNDS_MAX):
            if need_bytes <= 0:
                break
            some = [other for other in everyone if not spare_own or other is not known]
            ages = sorted((self._oldest(other, records), other.number, other) for other in some)
            if not ages or ages[0][0] == NONE or ages[0][2] is known:
                break
            bound = ages[1][0] if len(ages) > 1 else NONE
            than = NEWEST if bound == NONE else (bound[0], bound[1] + 1)
            choices = self.choices(ages[0][2].namespace.id, records)
            got_bytes, packed = self._call(ages[0][2], "evict", choices, need_bytes, *than)
            freed += freed_of(packed, records)
            need_bytes -= got_bytes
            if not got_bytes:
                break
        return freed

    def _free_slots(self, known: Known, records: dict[int, SegmentRecord]) -> int:
        """Slots of the namespace that the segments have room for."""
        every = self.stats()
        takes = [_segment(number, record, every) for number, record in records.items() if record.accepts]
        return sum(max(0, segment.free_bytes) // _slot_bytes(known) for segment in takes)

    def _oldest(self, known: Known, records: dict[int, SegmentRecord]) -> tuple[int, int]:
        found = self._call(known, "oldest", self.choices(known.namespace.id, records))
        return (int(found[0]), int(found[1])) if found else NONE

    def _all(self) -> list[Known]:
        self._pool.read_namespaces()
        return self._pool.all_known()

    def _call(self, known: Known, function: str, *arguments: Any) -> Any:
        return self._pool.link.call(self._pool.epoch.prefix(known.namespace.id), function, *arguments)

    def _stats(self, wanted: list[Known]) -> list[NamespaceStats]:
        if not wanted:
            return []
        prefix = self._pool.epoch.prefix
        found = self._pool.link.calls([(prefix(known.namespace.id), "stats", ()) for known in wanted])
        return [_namespace_stats(answer) for answer in found]


def freed_of(packed: list[Any], records: dict[int, SegmentRecord]) -> list[Freed]:
    """What a function freed, which returns it as {number, orders, ...}."""
    pairs = zip(packed[::2], packed[1::2], strict=True)
    return [(n, packing.unpack_orders(orders, records[n].segment_id)) for n, orders in pairs if orders and n in records]


def _slot_bytes(known: Known) -> int:
    return pages_of(known.namespace.block_bytes) * PAGE_BYTES


def _namespace_stats(answer: list[Any]) -> NamespaceStats:
    fields, reservations, leases, used = answer
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    counts: Counter[str] = Counter({name.decode(): int(value) for name, value in values.items()})
    return NamespaceStats(
        slot_bytes=counts["slot_bytes"],
        blocks=counts["live"],
        reservations=reservations,
        leases=leases,
        leased_bytes=counts["leased_bytes"],
        tombs=counts["tombs"],
        counts=counts,
        used=dict(zip(used[::2], used[1::2], strict=True)),
    )


def _capacity_bytes(record: SegmentRecord) -> int:
    return max(PAGE_BYTES, record.capacity_bytes - record.out_of_use_bytes)


def _segment(number: int, record: SegmentRecord, every: list[NamespaceStats]) -> Segment:
    segment = Segment(number, record.segment_id, record.node_id, _capacity_bytes(record), record.medium)
    segment.accepts, segment.open, segment.out_of_use_bytes = record.accepts, record.open, record.out_of_use_bytes
    segment.blocks = sum(stats.used.get(number, 0) for stats in every)
    segment.used_bytes = sum(stats.used.get(number, 0) * stats.slot_bytes for stats in every)
    return segment
