"""How full the segments are, summed up over namespaces, and who gives way when they are full."""

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

OLDEST = (2, 0)
NEWEST = (1, 1 << 52)


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
    """Sums over the namespaces of a pool. Keeps nothing: each answer is of the moment it is asked for."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def stats(self) -> list[NamespaceStats]:
        """Of every namespace."""
        self._pool.read_namespaces()
        return self._stats(self._pool.all_known())

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
        segments = self.segments()
        capacity_bytes = sum(segment.capacity_bytes for segment in segments)
        used_bytes = sum(segment.used_bytes for segment in segments)
        if used_bytes <= config.pressure * capacity_bytes:
            return -1.0
        return config.lease_cap * capacity_bytes / used_bytes

    def make_room(
        self, known: Known, records: dict[int, SegmentRecord], blocks: int
    ) -> list[tuple[int, list[FreeSlot]]]:
        """Let namespaces with older leaves than this one's give way to ``blocks`` of it; their slots, by segment.

        What its own leaves have to give is for its reservation itself to take.
        """
        everyone = self._all()
        if len(everyone) < 2:
            return []
        freed: list[tuple[int, list[FreeSlot]]] = []
        need_bytes = self._lack_bytes(known, records, blocks)
        for _ in range(ROUNDS_MAX):
            if need_bytes <= 0:
                break
            ages = sorted((self._oldest(other, records), other.number, other) for other in everyone)
            (_, _, oldest), (bound, _, _) = ages[0], ages[1]
            if oldest is known or ages[0][0] == OLDEST:
                break
            than = NEWEST if bound == OLDEST else (bound[0], bound[1] + 1)
            choices = self.choices(oldest.namespace.id, records)
            got, packed = self._call(oldest, "evict", choices, need_bytes, *than)
            for number, orders in zip(packed[::2], packed[1::2], strict=True):
                freed.append((number, packing.unpack_orders(orders, records[number].segment_id)))
            need_bytes -= got
            if not got:
                break
        return freed

    def _lack_bytes(self, known: Known, records: dict[int, SegmentRecord], blocks: int) -> int:
        namespace = known.namespace
        wanted_bytes = blocks * namespace.shards * pages_of(namespace.block_bytes) * PAGE_BYTES
        every = self.stats()
        takes = [_segment(number, record, every) for number, record in records.items() if record.accepts]
        return wanted_bytes - sum(segment.free_bytes for segment in takes)

    def _oldest(self, known: Known, records: dict[int, SegmentRecord]) -> tuple[int, int]:
        found = self._call(known, "oldest", self.choices(known.namespace.id, records))
        return (int(found[0]), int(found[1])) if found else OLDEST

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
