"""A directory, fake nodes that hold its slots, and what a test has to remember to hold one against the other."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product

from fake_node import FakeSegment, HeldSlot, chain, make_namespace
from msgspec import structs

from kvpool.core.clock import FOREVER_US, microseconds
from kvpool.core.directory import (
    DISK,
    BlockState,
    CommitStatus,
    Copy,
    Directory,
    DirectoryConfig,
    Drain,
    FreeSlot,
    Inventory,
    ReserveResult,
    Want,
)
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.namespace import Namespace
from kvpool.testing import ManualClock

from .inspect_directory import BlockView, Evictions, Key, Views, inspect, open_copies
from .tenants_watch import TenantsWatch

NAMESPACES = {"small": make_namespace(), "sharded": make_namespace(pages=2, shards=2)}
OF_TENANTS = {name: structs.replace(namespace, tenant=name) for name, namespace in NAMESPACES.items()}
"""The same, each of a tenant of its own."""

Tokens = tuple[int, ...]

CHAINS = {tokens: chain(*tokens) for depth in range(5, 0, -1) for tokens in product((0, 1), repeat=depth)}
"""All chains of a small tree: any two share the blocks of their common prefix."""

PARENTS = {hashes[-1]: (hashes[-2] if len(hashes) > 1 else b"") for hashes in reversed(CHAINS.values())}
"""Parent of every block, parents before children."""

SEGMENTS = (("node-0", 9, "shm"), ("node-0", 6, "shm"), ("node-1", 7, "shm"))
"""(node, pages, medium): far too little for `CHAINS`, so that most reserves evict."""

DISKS = (("node-0", 12, DISK), ("node-1", 5, DISK))
"""One that holds more than is read, and one that does not."""

Place = tuple[bytes, int, int]
"""(hash, shard, segment number)."""


@dataclass
class Write:
    """One reservation: what it may write, and what of it is still in flight."""

    number: int
    namespace: Namespace
    deadline_us: int
    places: list[Place]
    victims: dict[int, list[FreeSlot]]
    pending: set[Place] = field(default_factory=set)

    @property
    def in_flight(self) -> set[bytes]:
        return {block_hash for block_hash, _, _ in self.pending}

    def drop(self, block_hash: bytes) -> None:
        """The block is no longer this reservation's."""
        self.pending = {place for place in self.pending if place[0] != block_hash}


@dataclass
class Lease:
    """Blocks that a match promised to keep."""

    number: int
    namespace: Namespace
    hashes: list[bytes]
    until_us: int


class DirectoryModel:
    """Drives a directory as clients and nodes do, and checks every answer."""

    def __init__(self, age_slack: float, *, with_disks: bool, policy: str, namespaces: dict[str, Namespace]) -> None:
        self.clock = ManualClock()
        self.namespaces = {namespace.id: namespace for namespace in namespaces.values()}
        self.has_tenants = len({namespace.tenant for namespace in namespaces.values()}) > 1
        self.with_disks = with_disks
        self.config = DirectoryConfig(
            policy=policy, age_slack=age_slack, lease_cap=0.3, pressure=0.8, replica_budget=1.0, demote_fill=0.2
        )
        self.directory = self.open_directory()
        self.watched: Callable[[Namespace], AbstractContextManager[None]] = lambda _: nullcontext()
        if self.has_tenants:
            self.watched = TenantsWatch(self.directory, self._may_go).writing
        self.segments = [
            FakeSegment(bytes([i]) * 16, node_id, pages * PAGE_BYTES, medium)
            for i, (node_id, pages, medium) in enumerate((*SEGMENTS, *(DISKS if with_disks else ())))
        ]
        self.online: dict[int, FakeSegment] = {}
        self.unannounced: dict[bytes, set[tuple[int, int]]] = defaultdict(set)
        self.open: list[Write] = []
        self.leases: list[Lease] = []
        self.pins: dict[Key, int] = {}
        for namespace in namespaces.values():
            self.directory.open_namespace(namespace)
        for segment in self.segments:
            self.join(segment)

    def open_directory(self) -> Directory:
        return Directory(self.clock, self.config)

    def views(self) -> Views:
        """All entries, for the oracles that look at the order of eviction."""
        return inspect(self.directory)

    def open_copies(self) -> list[Copy]:
        """Copies that nodes were told to fetch and have not committed."""
        return open_copies(self.directory)

    def now_us(self) -> int:
        return microseconds(self.clock())

    # Writers

    def reserve(self, namespace: Namespace, hashes: list[bytes], cut: int, first: int, ttl_s: float) -> Write | None:
        """Reserve blocks ``first``… of a chain, given from block ``cut`` on; None when nothing was wanted."""
        before, evicted_blocks = self.views(), self.directory.stats().evicted_blocks
        parent = hashes[cut - 1] if cut else b""
        with self.watched(namespace):
            result = self.directory.reserve(namespace.id, b"".join(hashes[cut:]), first - cut, parent, ttl_s=ttl_s)
        self.expire()
        after = self.views()
        if result.missing_from is not None:
            present = [(namespace.id, h) in after for h in hashes[:first]]
            expected = -1 if cut and not present[cut - 1] else present.index(False, cut) - cut
            assert (result.missing_from, result.reservation, result.wants, result.shares) == (expected, 0, b"", {})
            return None
        write = self._opened(result, namespace, hashes[first:], ttl_s)
        self._check_wants(result, write, hashes[first:], before, after)
        self._check_evictions(result, namespace, hashes, first, before, after, evicted_blocks)
        return write if write.places else None

    def commit(self, write: Write, places: list[Place]) -> None:
        """Write ``places`` under the number of ``write``, which may own them or not."""
        for segment in self.segments:
            here = [place for place in places if place[2] == segment.number]
            if not here:
                continue
            segment.apply(write.victims[segment.number])
            slots = [segment.store(write.namespace, h, PARENTS[h], shard) for h, shard, _ in here]
            expected = [CommitStatus.COMMITTED if place in write.pending else CommitStatus.STALE for place in here]
            statuses = self.directory.commit(write.number, segment.segment_id, [s.written for s in slots])
            assert statuses == expected
            write.pending -= set(here)
            for slot, status in zip(slots, statuses, strict=True):
                if status == CommitStatus.STALE:
                    segment.free(slot.slot, slot.generation)

    def abort(self, write: Write, hashes: list[bytes], *, crowded: bool) -> None:
        """Give ``hashes`` (none: all) back; ``crowded`` evicts leaves that nobody holds."""
        before = self.views()
        expected = write.in_flight & set(hashes) if hashes else write.in_flight
        assert self.directory.abort(write.number, hashes or None, crowded=crowded) == len(expected)
        for block_hash in expected:
            write.drop(block_hash)
            del before[write.namespace.id, block_hash]
        evictions = Evictions(before, self.views(), set(), None, self._may_go, self._tenant_of)
        assert crowded or not evictions.evicted
        assert not evictions.evicted & self._protected(before)
        evictions.check_leaves_went_first()
        self.forget_pins()

    def expire(self) -> None:
        """The directory freed what abandoned reservations still held, and forgot the pins on it."""
        for write in self.open:
            if write.deadline_us <= self.now_us():
                for block_hash in write.in_flight:  # it may be there again, reserved anew
                    self.pins.pop((write.namespace.id, block_hash), None)
                write.pending = set()
        self.forget_pins()

    def _opened(self, result: ReserveResult, namespace: Namespace, asked: list[bytes], ttl_s: float) -> Write:
        places = [(asked[i], shard, number) for (number, shard), share in result.shares.items() for i in share.indexes]
        victims: dict[int, list[FreeSlot]] = defaultdict(list)
        for (number, _), share in result.shares.items():
            victims[number] += share.victims
        deadline_us = self.now_us() + microseconds(ttl_s)
        write = Write(result.reservation, namespace, deadline_us, places, victims, set(places))
        assert bool(places) == bool(result.reservation)
        if places:
            self.open.append(write)
        return write

    def _check_wants(
        self, result: ReserveResult, write: Write, asked: list[bytes], before: Views, after: Views
    ) -> None:
        placed = defaultdict(list)
        for block_hash, shard, number in write.places:
            placed[block_hash].append(shard)
            assert self.directory.segment(number).takes_new
        for block_hash, want in zip(asked, result.wants, strict=True):
            key = (write.namespace.id, block_hash)
            assert sorted(placed[block_hash]) == (list(range(write.namespace.shards)) if want == Want.WANTED else [])
            if want == Want.EXISTS:
                assert before[key].is_committed
                assert not before[key].is_partial
            if want == Want.IN_FLIGHT:
                assert before[key].state == BlockState.IN_FLIGHT
            assert key in after or want == Want.NO_ROOM
        wanted = result.wants.rstrip(bytes([Want.NO_ROOM]))
        assert Want.NO_ROOM not in wanted, "what is below a refused block is refused"

    def _check_evictions(
        self,
        result: ReserveResult,
        namespace: Namespace,
        hashes: list[bytes],
        first: int,
        before: Views,
        after: Views,
        evicted_blocks: int,
    ) -> None:
        refused = first + len(result.wants.rstrip(bytes([Want.NO_ROOM])))
        spared = None
        if refused < len(hashes):  # by a policy that learns perhaps since others are worth more
            spared = (namespace.id, PARENTS[hashes[refused]])
            if self.config.policy == "lru":
                self.nothing_could_go(namespace, spared, after)
        asked = {(namespace.id, h) for h in hashes[first:]}
        rewritten = {key for key in asked if key in before and before[key].is_partial}
        evictions = Evictions(before, after, rewritten, spared, self._may_go, self._tenant_of)
        assert self.directory.stats().evicted_blocks - evicted_blocks >= len(evictions.evicted)
        assert not evictions.evicted & self._protected(before), "leased and pinned blocks and their ancestors stay"
        evictions.check_leaves_went_first()
        if not self.with_disks:  # what was on disk too waits among the copies, by an age of its own
            if not self.has_tenants:  # those of who gives go first, not all there are
                evictions.check_copies_went_first(self.surplus_blocks())
            if self.config.policy == "lru":
                self.check_order(evictions)
        for key in rewritten | evictions.evicted:
            self.pins.pop(key, None)

    def check_order(self, evictions: Evictions) -> None:
        """Nothing went that was hotter than what stayed."""
        evictions.check_oldest_went_first(self.now_us(), self.config.age_slack)

    def nothing_could_go(self, namespace: Namespace, spared: Key, after: Views) -> None:
        could_go = {key for key, block in after.items() if self._may_go(block)}
        assert {key for key in could_go if self._tenant_of(key) == namespace.tenant} <= {spared}
        assert self.has_tenants or not self.surplus_blocks()
        if namespace.shards == 1 and self.directory.limits(namespace.tenant).bytes is None:
            free_bytes = [segment.free_bytes for segment in self.directory.segments() if segment.takes_new]
            assert max(free_bytes, default=0) < slot_bytes(namespace)

    def _tenant_of(self, key: Key) -> str:
        return self.namespaces[key[0]].tenant

    def _may_go(self, block: BlockView) -> bool:
        is_held = block.held_until_us > self.now_us()
        accepts = block.is_committed and self.directory.segment(block.home_segment).takes_new
        return block.is_leaf and accepts and not is_held

    def _protected(self, before: Views) -> set[Key]:
        """What a lease or a pin of the test covers."""
        now_us = self.now_us()
        keys = {(lease.namespace.id, h) for lease in self.leases if lease.until_us > now_us for h in lease.hashes}
        for (namespace_id, pinned), until_us in self.pins.items():
            block_hash = pinned
            while until_us > now_us and (namespace_id, block_hash) in before:
                keys.add((namespace_id, block_hash))
                block_hash = PARENTS[block_hash]
        return keys

    # Readers and operators

    def lease(self, number: int, namespace: Namespace, hashes: list[bytes], lease_s: float) -> None:
        """A match promised to keep these blocks."""
        self.leases.append(Lease(number, namespace, hashes, self.now_us() + microseconds(lease_s)))

    def check_matched(self, blocks: int, expected: int, lease_s: float, leased_bytes: int) -> None:
        """A match is the naive answer, unless the lease cap shortened it in a nearly full pool."""
        stats = self.directory.stats()
        if lease_s and stats.used_bytes - stats.surplus_bytes > self.config.pressure * stats.capacity_bytes:
            assert blocks <= expected
            assert stats.leased_bytes <= max(leased_bytes, self.config.lease_cap * stats.capacity_bytes)
        else:
            assert blocks == expected

    def pin(self, key: Key, ttl_s: float | None) -> None:
        """An operator pins a block, if it is there."""
        assert self.directory.pin(*key, ttl_s) == (key in self.views())
        self.pins[key] = FOREVER_US if ttl_s is None else self.now_us() + microseconds(ttl_s)
        self.forget_pins()

    def forget_pins(self) -> None:
        """A pin goes with its block."""
        present = self.views()
        self.pins = {key: until_us for key, until_us in self.pins.items() if key in present}

    # Nodes

    def join(self, segment: FakeSegment) -> None:
        """The segment joins, with all its slots to be announced."""
        where = (segment.segment_id, segment.node_id, segment.capacity_bytes, segment.medium)
        segment.number = self.directory.add_segment(*where)
        self.online[segment.number] = segment
        self.unannounced[segment.segment_id] = {(slot.slot, slot.generation) for slot in segment.held.values()}

    def announce(self, segment: FakeSegment, namespace: Namespace, slots: list[HeldSlot]) -> None:
        """The segment's node announces ``slots`` and frees what is not wanted."""
        before, ordered = self.views(), self.ordered(segment)
        free_bytes = self.directory.segment(segment.number).free_bytes
        wanted = self.directory.announce(segment.segment_id, namespace.id, Inventory.of([s.announced for s in slots]))
        copies: set[tuple[bytes, int]] = set()
        for slot, is_wanted in zip(slots, wanted, strict=True):
            self.unannounced[segment.segment_id].discard((slot.slot, slot.generation))
            if (slot.slot, slot.generation) in ordered:
                assert not is_wanted, "a freed block is not resurrected"
            elif (namespace.id, slot.hash) not in before and free_bytes >= slot.size_bytes * len(slots):
                assert is_wanted == ((slot.hash, slot.shard) not in copies), "what the pool lost comes back, once"
                copies.add((slot.hash, slot.shard))
            if not is_wanted:
                segment.free(slot.slot, slot.generation)

    def lost_by_force(self, keys: set[Key]) -> None:
        """Slots of ``keys`` went: what was in flight is dropped whole, leases keep what is still visible."""
        for write in self.open:
            for block_hash in write.in_flight:
                if (write.namespace.id, block_hash) in keys:
                    write.drop(block_hash)
        for lease in self.leases:
            lease.hashes = lease.hashes[: self.count_visible(lease.namespace, lease.hashes)]
        self.forget_pins()

    # Copies

    def fetch(self, copy: Copy, hashes: list[bytes]) -> None:
        """The destination's node commits ``hashes`` of a copy; each counts once, while it is asked for."""
        segment = next(segment for segment in self.segments if segment.segment_id == copy.destination.segment_id)
        namespace = self.directory.namespaces()[copy.namespace]
        is_open = self.directory.copy(copy.number) is copy
        expected = [
            CommitStatus.COMMITTED
            if is_open and h in copy.rows and self.holds(segment, namespace, h, copy.shard) is None
            else CommitStatus.STALE
            for h in hashes
        ]
        slots = [segment.store(namespace, h, PARENTS[h], copy.shard) for h in hashes]
        statuses = self.directory.commit(copy.number, segment.segment_id, [slot.written for slot in slots])
        assert statuses == expected
        for slot, status in zip(slots, statuses, strict=True):
            if status == CommitStatus.STALE:
                segment.free(slot.slot, slot.generation)

    def drain(self, node_id: str) -> Drain:
        """A node takes nothing new, and all that it alone holds is ordered elsewhere while there is room."""
        for segment in self.online.values():
            if segment.node_id == node_id:
                self.directory.set_accepting(segment.segment_id, accepting=False)
        drain = Drain(node_id)
        drain.begin(self.directory.survey(node_id).in_order())
        while self.directory.advance(drain, 30.0):
            pass
        return drain

    def surplus_blocks(self) -> int:
        """Copies in memory that may go."""
        return sum(segment.surplus_blocks for segment in self.directory.segments() if segment.takes_new)

    # What the nodes hold

    def holds(self, segment: FakeSegment, namespace: Namespace, block_hash: bytes, shard: int) -> HeldSlot | None:
        """The segment's slot of a block, as far as the directory knows."""
        wanted = (namespace, block_hash, shard)
        return next((s for s in self.live(segment) if (s.namespace, s.hash, s.shard) == wanted), None)

    def ordered(self, segment: FakeSegment) -> set[tuple[int, int]]:
        """(slot, generation) that unacknowledged orders free."""
        orders = self.directory.orders(segment.node_id, most=10_000)
        frees = [order for order in orders if isinstance(order, FreeSlot)]
        return {(order.slot, order.generation) for order in frees if order.segment_id == segment.segment_id}

    def live(self, segment: FakeSegment) -> list[HeldSlot]:
        """Slots that the directory must know: held, announced, and not ordered to be freed."""
        if segment.number not in self.online:
            return []
        unknown = self.ordered(segment) | self.unannounced[segment.segment_id]
        return [slot for slot in segment.held.values() if (slot.slot, slot.generation) not in unknown]

    def visible(self, namespace: Namespace) -> set[bytes]:
        """Blocks of which all shards lie somewhere, up to the root."""
        shards = defaultdict(set)
        for segment in self.online.values():
            for slot in self.live(segment):
                if slot.namespace is namespace:
                    shards[slot.hash].add(slot.shard)
        visible = {b""}
        for block_hash, parent in PARENTS.items():
            if len(shards[block_hash]) == namespace.shards and parent in visible:
                visible.add(block_hash)
        return visible - {b""}

    def count_visible(self, namespace: Namespace, hashes: list[bytes]) -> int:
        """The naive answer to `match`."""
        visible = self.visible(namespace)
        return next((i for i, h in enumerate(hashes) if h not in visible), len(hashes))

    def some_chain(self, namespace: Namespace, tokens: Tokens, pick: int) -> list[bytes]:
        """Mostly a chain that is there, sometimes the one of ``tokens``."""
        visible = sorted(self.visible(namespace))
        wanted = visible[pick % len(visible)] if visible and pick % 4 else CHAINS[tokens][-1]
        return next(hashes for hashes in CHAINS.values() if hashes[-1] == wanted)


def slot_bytes(namespace: Namespace) -> int:
    """Bytes that one shard of a block takes."""
    return -(-namespace.block_bytes // PAGE_BYTES) * PAGE_BYTES
