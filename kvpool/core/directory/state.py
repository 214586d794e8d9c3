"""The directory's state and the transitions that every operation is made of."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.core.clock import Clock, microseconds
from kvpool.core.directory.chains import Chains
from kvpool.core.directory.copies import Copies, Copy
from kvpool.core.directory.disk import Disk
from kvpool.core.directory.heat import Heat
from kvpool.core.directory.leases import LeaseLedger
from kvpool.core.directory.outbox import FreeSlot, Outbox
from kvpool.core.directory.pins import Pins
from kvpool.core.directory.placements import Placements
from kvpool.core.directory.placing import Placer
from kvpool.core.directory.reservations import Reservations
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.table import NIL, NO_SLOT, BlockState, BlockTable, Reuse
from kvpool.core.directory.tenants import Account, Tenants
from kvpool.core.directory.tombstones import Cause, MissReason, Tombstone, Tombstones
from kvpool.core.errors import UnknownNamespaceError
from kvpool.core.eviction import create_policy
from kvpool.core.namespace import Namespace
from kvpool.core.tenants import UNLIMITED, TenantLimits

FREED_MAX = 1024
"""Orders a grant carries at most; all of them travel on the control stream too."""

LATEST_MISSES_MAX = 64
"""Look-ups that ended early remembered, for people to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """How a directory decides.

    Attributes:
        policy: Eviction policy, a name in `kvpool.core.eviction.POLICIES`.
        lease_cap: Share of the capacity that leases may hold while the pool is nearly full.
        pressure: Fill above which the pool counts as nearly full.
        age_slack: See `Placer`.
        tombstones: How many departed blocks `explain` remembers.
        spare_s: How long after its start nothing is evicted from segments that announced blocks: readers may hold
            leases on them that an earlier directory gave.
        epoch: Up to 31 bits that every reservation and lease number begins with: random ones make numbers that an
            earlier directory gave name nothing here.
        replicas_max: Copies of a block that the pool makes by itself, the first one included; 1 for no others.
        replica_read_rate: Reads of a block a second that bring it one further copy.
        replica_budget: Share of what would be free on a segment without them that further copies may take.
        demote_fill: Used share of a node's memory from which on what was read goes to its disk too.
        tenants: Limits of tenants by name.
        tenant_default: Those of all others.
    """

    policy: str = "lru"
    lease_cap: float = 0.5
    pressure: float = 0.95
    age_slack: float = 0.05
    tombstones: int = 65_536
    spare_s: float = 0.0
    epoch: int = 0
    replicas_max: int = 2
    replica_read_rate: float = 20.0
    replica_budget: float = 0.5
    demote_fill: float = 0.75
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    tenant_default: TenantLimits = UNLIMITED


@dataclass(slots=True)
class NamespaceEntry:
    """A namespace as the directory knows it."""

    number: int
    namespace: Namespace
    slot_bytes: int
    """Bytes a slot takes: the block, up to the next page."""
    account: Account
    """Whose its blocks are."""
    asked_blocks: int = 0
    """Blocks that look-ups asked for since the service's start."""
    matched_blocks: int = 0
    """Of these, blocks that were there."""
    read_shards: int = 0
    """Shards of blocks that readers were told where to find."""
    stored_shards: int = 0
    """Shards of blocks that writers committed."""


class LatestMiss(NamedTuple):
    """A look-up that ended early: the block that was missing, why, and how many of those asked for were there."""

    at_us: int
    namespace: int
    missing: bytes
    reason: MissReason
    matched: int
    asked: int


class DirectoryState:
    """Tables, chains, accounts and the transitions between their states. See the modules beside this one."""

    def __init__(self, clock: Clock, config: DirectoryConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.misses: Counter[MissReason] = Counter()
        """Look-ups that ended before their chain did, by why."""
        self.latest_misses: deque[LatestMiss] = deque(maxlen=LATEST_MISSES_MAX)
        self.blocks = BlockTable()
        self.policy = create_policy(config.policy, self.blocks)
        self.leases = LeaseLedger(config.epoch << 32)
        self.chains = Chains(self.blocks, self.policy.changed, self.leases.move)
        self.tenants = Tenants(clock, config.tenants, config.tenant_default)
        self.pins = Pins(self.blocks, self.tenants)
        self.placements = Placements(self.blocks, self.tenants)
        self.placer = Placer(self.placements, self.tenants, self.policy, self.evict, self.reclaim, config.age_slack)
        self.reservations = Reservations(config.epoch << 32)
        self.copies = Copies()
        self.heat = Heat()
        self.tombstones = Tombstones(config.tombstones)
        self.outboxes: dict[str, Outbox] = {}
        self.namespaces: dict[bytes, NamespaceEntry] = {}
        self.entries: list[NamespaceEntry] = []
        self.segments_by_id: dict[bytes, Segment] = {}
        self.disks: dict[str, Disk] = {}
        """The open disk segments by node, and what waits to be copied to and from them."""
        self.freed: dict[int, deque[FreeSlot]] = {}
        """Latest orders by segment that no grant has carried: the next one there does, so that its slots find room."""
        self.lost: list[Segment] = []
        """Closed segments that still have placements, oldest loss first."""
        self.recovering = False
        self._clock = clock
        self.spared_until_us = self.now_us() + microseconds(config.spare_s)

    def now_us(self) -> int:
        """The clock's time in microseconds."""
        return microseconds(self._clock())

    def entry(self, namespace_id: bytes) -> NamespaceEntry:
        """The open namespace ``namespace_id``; raises UnknownNamespaceError."""
        entry = self.namespaces.get(namespace_id)
        if entry is None:
            # Not which: an id that the caller may not know is looked up as one that nobody has.
            raise UnknownNamespaceError("this namespace is not open here; open it with its document first")
        return entry

    def hold(self, row: int, until_us: int) -> None:
        """Keep ``row``, and so its ancestors, from eviction until then."""
        self.blocks.held_until_us[row] = max(self.blocks.held_until_us[row], until_us)

    def evict(self, row: int, cause: Cause = Cause.ROOM) -> None:
        """Remove a leaf that the policy gave up; nobody holds it, so its slots are reusable at once."""
        self.counts["evicted_blocks"] += 1
        self.counts["scattered_blocks"] += cause is Cause.SCATTERED
        self.counts["evicted_bytes"] += self._slot_bytes(row) * sum(1 for _ in self.placements.of_block(row))
        self.remove_block(row, MissReason.EVICTED, cause)

    def reclaim(self, placement: int) -> None:
        """Give a surplus copy up; its block stays where its primary copy is.

        Its slot is reusable at once, though a reader may be at it: what it reads then fails its checksum, and it turns
        to another copy.
        """
        self.counts["reclaimed_copies"] += 1
        row = self.placements.rows.block[placement]
        self._order_free(placement, rest=False)
        self.placements.remove(placement, self._slot_bytes(row))

    def drop_copy(self, placement: int) -> None:
        """Give up one of several copies of a shard, be it the primary one."""
        row = self.placements.rows.block[placement]
        self._order_free(placement, rest=self.blocks.hold_us(row) > self.now_us())
        self.placements.remove(placement, self._slot_bytes(row))
        self.policy.changed(row)

    def complete_shard(self, row: int) -> None:
        """A lost shard has come back; the block wakes with its last one, if its parent is visible."""
        self.blocks.missing_shards[row] -= 1
        if self.blocks.missing_shards[row]:
            # Its other shards come from other nodes' inventories, or never: kept, not matched, evicted first.
            self.chains.doze(row)
        else:
            self.chains.complete(row)

    def make_primary(self, placement: int) -> None:
        """See `Placements.make_primary`; its block waits to be evicted there from now on."""
        row = self.placements.rows.block[placement]
        self.placements.make_primary(placement, self._slot_bytes(row))
        self.policy.changed(row)

    def remove_block(self, row: int, reason: MissReason, cause: Cause | None = None) -> None:
        """Take the block out with all its placements, ordering their nodes to free the slots."""
        # A lease on a block below covers this one too.
        rest = self.blocks.first_child[row] != NIL or self.blocks.hold_us(row) > self.now_us()
        for placement in self.placements.of_block(row):
            self._order_free(placement, rest=rest)
            self.placements.remove(placement, self._slot_bytes(row))
        self._forget(row, reason, cause)

    def drop_placement(self, placement: int, reason: MissReason, cause: Cause | None = None, *, order: bool) -> None:
        """One copy of one shard is gone, or must go (``order``); what is left decides what becomes of its block."""
        rows, blocks = self.placements.rows, self.blocks
        row, shard, segment = rows.block[placement], rows.shard[placement], rows.segment[placement]
        if order:
            self._order_free(placement, rest=True)
        self.placements.remove(placement, self._slot_bytes(row))
        if blocks.placement[row] == NIL:
            self._forget(row, reason, cause)
        elif blocks.state[row] == BlockState.IN_FLIGHT:
            self.remove_block(row, reason, cause)
        elif any(rows.shard[p] == shard for p in self.placements.of_block(row)):
            self.policy.changed(row)
        else:
            blocks.missing_shards[row] += 1
            self.chains.doze(row)
            self._bury(row, segment, reason, cause)
            self.policy.changed(row)

    def give_up(self, copy: Copy, hashes: Iterable[bytes]) -> int:
        """Blocks of ``copy`` that will not be fetched, or just were: take their promised bytes back; how many."""
        given_up = [block_hash for block_hash in hashes if block_hash in copy.rows]
        for block_hash in given_up:
            if copy.destination.is_disk:
                self.blocks.reused[copy.rows[block_hash]] = Reuse.NONE  # the next read makes another try
            self.copies.settle(copy, block_hash)
        self.placements.withdraw(copy.destination, copy.namespace, len(given_up) * copy.slot_bytes)
        return len(given_up)

    def expire(self) -> None:
        """Free what abandoned reservations still hold, and forget leases that ran out."""
        now_us = self.now_us()
        for reservation in self.reservations.due(now_us):
            for row in list(reservation.rows):
                self.counts["expired_blocks"] += 1
                self.remove_block(row, MissReason.EXPIRED)
        for copy in self.copies.due(now_us):
            self.give_up(copy, list(copy.rows))
        self.leases.expire(now_us)
        self.pins.expire(now_us)

    def _forget(self, row: int, reason: MissReason, cause: Cause | None) -> None:
        if reason != MissReason.COLD:  # it found no room: why it left before still holds
            self._bury(row, self.blocks.home_segment[row], reason, cause)
        self.reservations.release(row)
        for copy in self.copies.of_row(row):
            self.give_up(copy, [self.blocks.hash[row]])
        if row in self.blocks.pinned_until_us:
            self.pins.unpin(row)
        self.chains.remove(row)

    def _bury(self, row: int, segment: int, reason: MissReason, cause: Cause | None) -> None:
        # Once a block while the pool is full: nothing is worked out here that `explain` can work out.
        blocks, placements = self.blocks, self.placements
        home = placements.segments.get(segment)
        node, last_use_us = home.node_id if home is not None else "", blocks.last_use_us[row]
        pool = placements.memory.used_bytes, placements.memory.capacity_bytes
        tombstone = Tombstone(reason, self.now_us(), cause, node, last_use_us, *pool)
        self.tombstones.bury(blocks.namespace[row], blocks.hash[row], tombstone)

    def _order_free(self, placement: int, *, rest: bool) -> None:
        rows = self.placements.rows
        if rows.slot[placement] == NO_SLOT:
            return
        segment = self.placements.segments[rows.segment[placement]]
        rest = rest or segment.spared_until_us > self.now_us()
        outbox = self.outboxes.setdefault(segment.node_id, Outbox())
        order = outbox.push(segment.segment_id, rows.slot[placement], rows.generation[placement], rest=rest)
        self.freed.setdefault(segment.number, deque(maxlen=FREED_MAX)).append(order)

    def _slot_bytes(self, row: int) -> int:
        return self.entries[self.blocks.namespace[row]].slot_bytes
