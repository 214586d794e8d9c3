"""The directory in Redis or Valkey: each operation is one function there, on the keys of one namespace.

What spans namespaces is not atomic: how full segments are is summed up over them, and when the pool is full the
namespace with the oldest leaf gives way first. A node has the last word on its bytes: a sum that is out of date costs
a refused write at most. See docs/design/redis.md.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.core.clock import FOREVER_US, microseconds
from kvpool.core.directory import (
    LEASE_MARGIN_S,
    SHM,
    CommitStatus,
    DirectoryConfig,
    DirectoryStats,
    Explanation,
    Inventory,
    Location,
    LookupStats,
    Match,
    Memory,
    MissReason,
    Order,
    ReserveResult,
    Segment,
    TenantStats,
)
from kvpool.core.directory.writing import Committed
from kvpool.core.errors import InvalidHashError, UsageError
from kvpool.core.keys import NO_PARENT, count_hashes
from kvpool.core.limits import MATCH_BLOCKS_MAX, PAGE_BYTES
from kvpool.core.namespace import Namespace
from kvpool.core.units import pages_of
from kvpool.meta.store import packing
from kvpool.meta.store.explaining import explanation
from kvpool.meta.store.link import RedisLink
from kvpool.meta.store.lookups import Lookups, pool_stats
from kvpool.meta.store.matching import match
from kvpool.meta.store.outboxes import Outboxes
from kvpool.meta.store.pool import Epoch, Known, Pool, SegmentRecord
from kvpool.meta.store.reserving import NUMBER_BITS, Wanted, number_of, number_within, reserve
from kvpool.meta.store.usage import Usage
from kvpool.meta.store.viewing import RedisView

_UNSURE = (MissReason.COLD, MissReason.PARENT_MISSING)


class RedisStore:
    """A `Store` for one epoch of the state in Redis. Thread-safe; any number of them serve one pool.

    Args:
        link: The way there.
        epoch: What `current_epoch` said.
        config: As the directory in memory takes it. All services of a pool must be given the same.
    """

    def __init__(self, link: RedisLink, epoch: Epoch, config: DirectoryConfig) -> None:
        self.link = link
        self.epoch = epoch
        self.pool = Pool(link, epoch)
        self.usage = Usage(self.pool)
        self._config = config
        self._outboxes = Outboxes(self.pool)
        self._recovering = False
        self._opened: set[bytes] = set()
        self._lookups = Lookups()
        self.view = RedisView(self.pool, self.usage, self._lookups)

    # Namespaces

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Directory.open_namespace`."""
        if namespace.id in self._opened:
            return
        self.pool.open_namespace(namespace)
        base = (self.epoch.number & 0x3FFFF) << 32
        slot_bytes = pages_of(namespace.block_bytes) * PAGE_BYTES
        where = self.epoch.prefix(namespace.id)
        self.link.call(where, "open", slot_bytes, namespace.shards, base, self._config.tombstones)
        self._opened.add(namespace.id)

    def namespaces(self) -> list[Namespace]:
        """See `Directory.namespaces`."""
        self.pool.read_namespaces()
        return [known.namespace for known in self.pool.all_known()]

    def namespace(self, namespace_id: bytes) -> Namespace:
        """See `Directory.namespace`."""
        return self.pool.known(namespace_id).namespace

    def knows(self, namespace_id: bytes) -> bool:
        """See `Directory.knows`."""
        return any(known.namespace.id == namespace_id for known in self.pool.all_known()) or any(
            namespace.id == namespace_id for namespace in self.namespaces()
        )

    def tenants(self) -> list[TenantStats]:
        """See `Directory.tenants`: nobody has limits here, so that there is nothing to tell."""
        return []

    def is_of(self, namespace_id: bytes, tenant: str) -> bool:
        """Whether the namespace is open and the tenant's. A no takes as long for one as for the other."""
        if self.pool.is_of(namespace_id, tenant):
            return True
        self.pool.read_namespaces()
        return self.pool.is_of(namespace_id, tenant)

    def tenant_of(self, number: int) -> str | None:
        """Whose blocks a lease or reservation is of; None where its namespace is not open."""
        known = self._known_of(number)
        return None if known is None else known.namespace.tenant

    # Nodes and segments

    def add_segment(self, segment_id: bytes, node_id: str, capacity_bytes: int, medium: str = SHM) -> int:
        """See `Directory.add_segment`; the medium must be memory."""
        if any(record.segment_id == segment_id and record.open for record in self.pool.segments().values()):
            raise UsageError(f"segment {segment_id.hex()} is open already; lose it before it joins again")
        if capacity_bytes <= 0:
            raise UsageError(f"segment {segment_id.hex()} has {capacity_bytes} bytes; give at least a page")
        self._outboxes.begin(node_id)
        return self.pool.add_segment(SegmentRecord(segment_id, node_id, capacity_bytes, medium))

    def lose_segment(self, segment_id: bytes) -> int:
        """See `Directory.lose_segment`."""
        found = self._open_segment(segment_id)
        if found is None:
            return 0
        number, record = found
        record.open = record.accepts = False
        self.pool.put_segment(number, record)
        return self.usage.blocks(number)

    def drop_lost(self, most: int = FOREVER_US) -> int:
        """See `Directory.drop_lost`."""
        left = 0
        for number, record in self.pool.segments().items():
            if record.open or record.waits:
                continue
            namespaces = [known.namespace.id for known in self._all_known()]
            here = sum(self._call(namespace_id, "lose", number, most) for namespace_id in namespaces)
            left += here
            if not here:
                self.pool.drop_segment(number)
        return left

    def keep_for_inventory(self, segment_id: bytes) -> None:
        """Close a segment whose node is about to announce what is on it: its blocks stay until `settle_inventory`."""
        found = self._open_segment(segment_id)
        if found is not None:
            found[1].open, found[1].accepts, found[1].waits = False, False, True
            self.pool.put_segment(*found)

    def settle_inventory(self, node_id: str) -> None:
        """The node's inventory is complete, or will not come: what is left on its earlier segments is dropped."""
        for number, record in self.pool.segments().items():
            if record.node_id == node_id and record.waits:
                record.waits = False
                self.pool.put_segment(number, record)

    def lose_late(self, number: int, namespace_id: bytes) -> None:
        """Drop what a node whose session had ended still brought to a segment that is lost already."""
        self._call(namespace_id, "lose", number, FOREVER_US)

    def lose_late_write(self, number: int, reservation: int) -> None:
        """The same of what a writer committed there."""
        known = self._known_of(reservation)
        if known is not None:
            self.lose_late(number, known.namespace.id)

    def set_recovering(self, *, recovering: bool) -> None:
        """See `Directory.set_recovering`."""
        self._recovering = recovering

    def set_out_of_use(self, segment_id: bytes, size_bytes: int) -> None:
        """See `Directory.set_out_of_use`."""
        found = self._open_segment(segment_id)
        if found is not None and found[1].out_of_use_bytes != size_bytes:
            found[1].out_of_use_bytes = size_bytes
            self.pool.put_segment(*found)

    def set_accepting(self, segment_id: bytes, *, accepting: bool) -> None:
        """See `Directory.set_accepting`."""
        found = self._open_segment(segment_id)
        if found is not None and found[1].accepts != accepting:
            found[1].accepts = accepting
            self.pool.put_segment(*found)

    def segment(self, number: int) -> Segment:
        """See `Directory.segment`."""
        return next(segment for segment in self.segments() if segment.number == number)

    def segments(self) -> list[Segment]:
        """See `Directory.segments`: a picture of this moment."""
        return self.usage.segments()

    def orders(self, node_id: str, after: int = 0, most: int = 1024) -> list[Order]:
        """See `Directory.orders`; the numbers hold for this service, until the node joins again."""
        return self._outboxes.orders(node_id, after, most)

    def acknowledge(self, node_id: str, number: int) -> None:
        """See `Directory.acknowledge`."""
        self._outboxes.acknowledge(node_id, number)

    def announce(self, segment_id: bytes, namespace_id: bytes, blocks: Inventory) -> NDArray[np.bool_]:
        """See `Directory.announce`. A second copy is not wanted, unless it is what an earlier session held."""
        found = self._open_segment(segment_id)
        if found is None:
            raise UsageError(f"segment {segment_id.hex()} is not open; its node must join again")
        choice = self.usage.choices(namespace_id, {found[0]: found[1]})
        spared_us = self.epoch.began_us + microseconds(self._config.spare_s)
        flags = self._call(namespace_id, "announce", choice, spared_us, packing.pack_inventory(blocks))
        return np.frombuffer(flags, np.bool_).copy()

    def gone(
        self,
        segment_id: bytes,
        namespace_id: bytes,
        block_hash: bytes,
        slot: int,
        generation: int,
        *,
        bad: bool = False,
    ) -> bool:
        """See `Directory.gone`."""
        why = ("verify_failed", "scrub") if bad else ("expired", "gone")
        return self._drop(segment_id, namespace_id, block_hash, slot, generation, *why, order=False)

    def report_bad(self, segment_id: bytes, namespace_id: bytes, block_hash: bytes, slot: int, generation: int) -> bool:
        """See `Directory.report_bad`."""
        why = ("verify_failed", "reader")
        return self._drop(segment_id, namespace_id, block_hash, slot, generation, *why, order=True)

    # Readers

    def match(self, namespace_id: bytes, hashes: bytes, first: int = 0, lease_s: float = 0.0) -> Match:
        """See `Directory.match`; of a pool that is nearly full a namespace may lease its part of the cap."""
        blocks = _check_first(hashes, first)
        known = self.pool.known(namespace_id)
        share = self.usage.lease_share(self._config) if lease_s > 0 else -1.0
        lease_us = microseconds(lease_s + LEASE_MARGIN_S) if lease_s > 0 else 0
        prefix = self.epoch.prefix(namespace_id)
        matched, said, lease, whole = match(self.link, prefix, hashes, first, lease_us, share)
        reason = self._reason(said) if matched < blocks else None
        self._lookups.note(namespace_id, blocks, matched, reason, shortened=matched < whole)
        return Match(matched, reason, number_of(known, lease))

    def release(self, lease: int) -> bool:
        """See `Directory.release`."""
        known = self._known_of(lease)
        return known is not None and bool(self._call(known.namespace.id, "release", number_within(lease)))

    def locate(self, namespace_id: bytes, hashes: bytes, first: int = 0, shard: int | None = None) -> Location:
        """See `Directory.locate`."""
        blocks = _check_first(hashes, first)
        namespace = self.pool.known(namespace_id).namespace
        located, said, placed = self._call(namespace_id, "locate", hashes, first, -1 if shard is None else shard)
        reason = self._reason(said) if first + located < blocks else None
        location = packing.unpack_location(located, placed, namespace.shards, reason)
        shards = namespace.shards if shard is None else 1
        self._lookups.moved("read", namespace_id, located * shards * namespace.block_bytes)
        return location

    def explain(self, namespace_id: bytes, block_hash: bytes) -> MissReason | None:
        """See `Directory.explain`."""
        self.pool.known(namespace_id)
        return self._reason(self._call(namespace_id, "why", block_hash)[0])

    def explain_block(self, namespace_id: bytes, block_hash: bytes) -> Explanation:
        """See `Directory.explain_block`."""
        self.pool.known(namespace_id)
        said = self._call(namespace_id, "explain", block_hash)
        return explanation(said, self._reason, self.pool.node_of_segment)

    def memory(self) -> Memory:
        """See `Directory.memory`: how far back is not known, only whether there is an end to it."""
        return Memory(full=any(stats.tombs >= self._config.tombstones for stats in self.usage.stats()), since_s=None)

    # Writers

    def reserve(
        self,
        namespace_id: bytes,
        hashes: bytes,
        first: int = 0,
        parent: bytes = NO_PARENT,
        *,
        owner: str = "",
        ttl_s: float = 30.0,
    ) -> ReserveResult:
        """See `Directory.reserve`."""
        wanted = Wanted(hashes, first, parent, owner, microseconds(ttl_s), self._config.age_slack)
        return reserve(self.pool, self.usage, self.pool.known(namespace_id), wanted)

    def commit(self, reservation: int, segment_id: bytes, written: list[Committed]) -> list[CommitStatus]:
        """See `Directory.commit`."""
        known, found = self._known_of(reservation), self._open_segment(segment_id)
        if known is None or found is None or not written:
            return [CommitStatus.STALE] * len(written)
        arguments = (number_within(reservation), found[0], packing.pack_written(written))
        statuses = [CommitStatus(status) for status in self._call(known.namespace.id, "commit", *arguments)]
        stored_bytes = statuses.count(CommitStatus.COMMITTED) * known.namespace.block_bytes
        self._lookups.moved("stored", known.namespace.id, stored_bytes)
        return statuses

    def abort(self, reservation: int, hashes: list[bytes] | None = None, *, crowded: bool = False) -> int:
        """See `Directory.abort`."""
        known = self._known_of(reservation)
        if known is None or hashes == []:
            return 0
        packed = b"".join(hashes or ())
        return int(self._call(known.namespace.id, "abort", number_within(reservation), packed, int(crowded)))

    def expire(self) -> None:
        """See `Directory.expire`."""
        self.link.calls([(self.epoch.prefix(known.namespace.id), "expire", ()) for known in self._all_known()])

    # Operators

    def pin(self, namespace_id: bytes, block_hash: bytes, ttl_s: float | None = None) -> bool:
        """See `Directory.pin`."""
        self.pool.known(namespace_id)
        return bool(self._call(namespace_id, "pin", block_hash, -1 if ttl_s is None else microseconds(ttl_s)))

    def unpin(self, namespace_id: bytes, block_hash: bytes) -> bool:
        """See `Directory.unpin`."""
        self.pool.known(namespace_id)
        return bool(self._call(namespace_id, "unpin", block_hash))

    def stats(self) -> DirectoryStats:
        """See `Directory.stats`; look-ups are those of this service alone."""
        return pool_stats(self.usage.stats(), self.segments(), self._lookups, self._outboxes.pending())

    def lookup_stats(self) -> LookupStats:
        """See `Directory.lookup_stats`; those of this service alone."""
        return self._lookups.stats(
            {known.namespace.id: known.namespace.block_tokens for known in self.pool.all_known()}
        )

    def _call(self, namespace_id: bytes, function: str, *arguments: Any) -> Any:
        return self.link.call(self.epoch.prefix(namespace_id), function, *arguments)

    def _all_known(self) -> list[Known]:
        self.pool.read_namespaces()
        return self.pool.all_known()

    def _known_of(self, number: int) -> Known | None:
        """The namespace of a reservation or lease."""
        wanted = number >> NUMBER_BITS
        found = next((known for known in self.pool.all_known() if known.number == wanted), None)
        return found or next((known for known in self._all_known() if known.number == wanted), None)

    def _open_segment(self, segment_id: bytes) -> tuple[int, SegmentRecord] | None:
        every = self.pool.segments().items()
        return next(((n, record) for n, record in every if record.open and record.segment_id == segment_id), None)

    def _drop(
        self,
        segment_id: bytes,
        namespace_id: bytes,
        block_hash: bytes,
        slot: int,
        generation: int,
        reason: str,
        cause: str,
        *,
        order: bool,
    ) -> bool:
        found = self._open_segment(segment_id)
        if found is None:
            return False
        self.pool.known(namespace_id)
        what = (found[0], block_hash, slot, generation.to_bytes(8, "little"), reason, cause, int(order))
        return bool(self._call(namespace_id, "gone", *what))

    def _reason(self, said: bytes) -> MissReason | None:
        if not said:
            return None
        if said == b"unknown":
            return MissReason.RECOVERING if self._recovering else MissReason.NODE_DOWN
        reason = MissReason(said.decode())
        return MissReason.RECOVERING if self._recovering and reason in _UNSURE else reason


def _check_first(hashes: bytes, first: int) -> int:
    blocks = count_hashes(hashes, MATCH_BLOCKS_MAX)
    if not 0 <= first < blocks:
        raise InvalidHashError(f"first is {first}; it must be an index into the {blocks} hashes")
    return blocks
