"""The directory: one entry a block, keyed by namespace and chained hash.

This class is the whole interface of the package; it is not thread-safe (its shell holds one lock) and does no I/O.
Times come from the clock it is given. Rules and their reasons: docs/design/directory.md.
"""

import numpy as np
from numpy.typing import NDArray

from kvpool.core.clock import FOREVER_US, Clock, microseconds
from kvpool.core.directory import (
    checking,
    draining,
    explaining,
    inventory,
    lookup,
    losing,
    owning,
    quotas,
    replicating,
    tiering,
    writing,
)
from kvpool.core.directory.copies import Copy
from kvpool.core.directory.disk import Disk
from kvpool.core.directory.draining import Drain, Survey
from kvpool.core.directory.explaining import Explanation, Memory
from kvpool.core.directory.following import Following
from kvpool.core.directory.heat import Demand, HotRun
from kvpool.core.directory.inventory import Inventory
from kvpool.core.directory.outbox import Order, Outbox
from kvpool.core.directory.results import CommitStatus, DirectoryStats, Location, LookupStats, Match, ReserveResult
from kvpool.core.directory.segments import DISK, SHM, Segment
from kvpool.core.directory.state import DirectoryConfig, DirectoryState, NamespaceEntry
from kvpool.core.directory.table import NIL
from kvpool.core.directory.tenants import TenantStats
from kvpool.core.directory.tombstones import Cause, MissReason
from kvpool.core.directory.viewing import View
from kvpool.core.directory.writing import Committed
from kvpool.core.errors import CapacityError, UsageError
from kvpool.core.keys import NO_PARENT
from kvpool.core.limits import NAMESPACES_MAX, PAGE_BYTES, SEGMENTS_MAX
from kvpool.core.namespace import Namespace
from kvpool.core.tenants import TenantLimits
from kvpool.core.units import pages_of

COUNTS = (
    "evicted_blocks",
    "evicted_bytes",
    "scattered_blocks",
    "expired_blocks",
    "lost_blocks",
    "bad_blocks",
    "refused_blocks",
    "copied_blocks",
    "copied_bytes",
    "reclaimed_copies",
    "demoted_blocks",
    "promoted_blocks",
    "lookups",
    "matches_shortened",
)
"""Counters that `DirectoryStats` shows."""


class Directory:
    """Which blocks the pool holds, where, and who may write or must free what.

    Attributes:
        following: What becomes visible and what ceases to be.
    """

    def __init__(self, clock: Clock, config: DirectoryConfig | None = None) -> None:
        self._state = DirectoryState(clock, config or DirectoryConfig())
        self._segments_opened = 0
        self.following = Following(self._state.chains)

    def open_namespace(self, namespace: Namespace) -> None:
        """Make ``namespace`` known; opening it again changes nothing.

        Raises:
            CapacityError: `NAMESPACES_MAX` are open.
        """
        state = self._state
        if namespace.id in state.namespaces:
            return
        if len(state.namespaces) >= NAMESPACES_MAX:
            raise CapacityError(f"{NAMESPACES_MAX} namespaces are open, the limit; drop old ones by raising an epoch")
        slot_bytes = pages_of(namespace.block_bytes) * PAGE_BYTES
        account = state.tenants.account(namespace.tenant)
        entry = NamespaceEntry(state.chains.add_namespace(), namespace, slot_bytes, account)
        state.blocks.owners.append(account.number)
        state.namespaces[namespace.id] = entry
        state.entries.append(entry)

    def namespaces(self, after: int = 0) -> list[Namespace]:
        """The open namespaces, oldest first, without the first ``after``."""
        return [entry.namespace for entry in self._state.entries[after:]]

    def namespace(self, namespace_id: bytes) -> Namespace:
        """The open namespace with this id; raises UnknownNamespaceError."""
        return self._state.entry(namespace_id).namespace

    def knows(self, namespace_id: bytes) -> bool:
        """Whether the namespace is open."""
        return namespace_id in self._state.namespaces

    def tenant_of(self, *, namespace: bytes = b"", lease: int = 0, reservation: int = 0) -> str | None:
        """Whose blocks are in a namespace, under a lease or in a reservation; None for one that is not there."""
        if namespace:
            return owning.tenant_of_namespace(self._state, namespace)
        if lease:
            return owning.tenant_of_lease(self._state, lease)
        return owning.tenant_of_reservation(self._state, reservation)

    # Nodes and segments

    def add_segment(self, segment_id: bytes, node_id: str, capacity_bytes: int, medium: str = SHM) -> int:
        """Open an empty segment of a node and return its number, the name `Location` uses.

        Raises:
            UsageError: The segment is open already, its capacity is not positive, or it is the node's second disk.
            CapacityError: Too many segments were opened since the directory was made.
        """
        state = self._state
        if segment_id in state.segments_by_id:
            raise UsageError(f"segment {segment_id.hex()} is open already; lose it before it joins again")
        if capacity_bytes <= 0:
            raise UsageError(
                f"segment {segment_id.hex()} has a capacity of {capacity_bytes} bytes; give at least a page"
            )
        if medium == DISK and node_id in state.disks:
            raise UsageError(f"node {node_id!r} has a disk segment already; give it one, of the size that it needs")
        if self._segments_opened >= SEGMENTS_MAX:
            raise CapacityError(f"{SEGMENTS_MAX} segments were opened, the limit; restart the metadata service")
        segment = Segment(self._segments_opened, segment_id, node_id, capacity_bytes, medium)
        self._segments_opened += 1
        state.segments_by_id[segment_id] = segment
        state.placements.add_segment(segment)
        if segment.is_disk:
            state.disks[node_id] = Disk(segment)
        state.outboxes.setdefault(node_id, Outbox())
        return segment.number

    def lose_segment(self, segment_id: bytes) -> int:
        """Close a segment whose node is gone; `drop_lost` drops what lies there.

        Returns:
            Placements lost; 0 for a segment that is not open.
        """
        segment = self._state.segments_by_id.get(segment_id)
        if segment is None:
            return 0
        losing.close_segment(self._state, segment)
        return segment.blocks

    def drop_lost(self, most: int = FOREVER_US) -> int:
        """Drop up to ``most`` placements of lost segments; returns how many are left for further calls.

        Touches those placements and the descendants of what goes, which turn dormant; never other blocks.
        """
        return losing.drop_lost(self._state, most)

    def set_recovering(self, *, recovering: bool) -> None:
        """Whether nodes have yet to announce what they hold: what is not known then is `MissReason.RECOVERING`."""
        self._state.recovering = recovering

    def set_out_of_use(self, segment_id: bytes, size_bytes: int) -> None:
        """So many bytes of the segment cannot be used now, and the rest is its capacity; at least a page stays."""
        segment = self._state.segments_by_id[segment_id]
        whole_bytes = segment.capacity_bytes + segment.out_of_use_bytes
        change = min(size_bytes, whole_bytes - PAGE_BYTES) - segment.out_of_use_bytes
        segment.out_of_use_bytes += change
        segment.capacity_bytes -= change
        segment.totals.capacity_bytes -= change

    def set_accepting(self, segment_id: bytes, *, accepting: bool) -> None:
        """Whether new blocks may be placed on the segment (a draining node's may not)."""
        self._state.segments_by_id[segment_id].accepts = accepting

    def segment(self, number: int) -> Segment:
        """The open segment ``number``, to read only."""
        return self._state.placements.segments[number]

    def segments(self) -> list[Segment]:
        """All open segments, to read only."""
        return [segment for segment in self._state.placements.segments.values() if segment.open]

    def orders(self, node_id: str, after: int = 0, most: int = 1024) -> list[Order]:
        """Orders for a node with numbers above ``after``, in order; they stay until acknowledged."""
        outbox = self._state.outboxes.get(node_id)
        return outbox.pending(after, most) if outbox is not None else []

    def acknowledge(self, node_id: str, number: int) -> None:
        """The node has applied its orders up to ``number``."""
        outbox = self._state.outboxes.get(node_id)
        if outbox is not None:
            outbox.acknowledge(number)

    def announce(self, segment_id: bytes, namespace_id: bytes, blocks: Inventory) -> NDArray[np.bool_]:
        """Take over part of a node's inventory: committed slots, parents in any order.

        Returns:
            One flag a block; False means the directory does not want it (freed meanwhile, in flight, known on this
            segment, no room) and the node must free the slot.
        """
        state = self._state
        return inventory.announce(state, state.segments_by_id[segment_id], state.entry(namespace_id), blocks)

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
        """The node no longer serves this slot, be it that its bytes are ``bad``; False when the directory knew."""
        why = (MissReason.VERIFY_FAILED, Cause.SCRUB) if bad else (MissReason.EXPIRED, Cause.GONE)
        dropped = self._drop(segment_id, namespace_id, block_hash, slot, generation, *why, order=False)
        self._state.counts["bad_blocks"] += dropped and bad
        return dropped

    def report_bad(self, segment_id: bytes, namespace_id: bytes, block_hash: bytes, slot: int, generation: int) -> bool:
        """A reader's checksum failed: drop the placement and order its node to quarantine the slot."""
        why = (MissReason.VERIFY_FAILED, Cause.READER)
        dropped = self._drop(segment_id, namespace_id, block_hash, slot, generation, *why, order=True)
        self._state.counts["bad_blocks"] += dropped
        return dropped

    # Readers

    def match(self, namespace_id: bytes, hashes: bytes, first: int = 0, lease_s: float = 0.0) -> Match:
        """Length of the longest visible prefix of the chain; O(log n) look-ups, O(1) lease and touch.

        Args:
            namespace_id: Its namespace.
            hashes: The chain from its root, packed.
            first: The first block the caller has a use for; a lease is charged from there on.
            lease_s: Seconds for which the matched blocks will not be evicted; 0 for none. Past the lease cap the
                match is shortened.

        Raises:
            InvalidHashError: No hashes, too many, or a wrong length.
            UnknownNamespaceError: The namespace is not open.
        """
        return lookup.match(self._state, namespace_id, hashes, first, lease_s)

    def release(self, lease: int) -> bool:
        """End the lease of a match early; False when it is over already."""
        return lookup.release(self._state, lease)

    def locate(self, namespace_id: bytes, hashes: bytes, first: int = 0, shard: int | None = None) -> Location:
        """Where blocks ``first``… of the chain lie, as far as they are visible; a touch as in `match`, no lease.

        ``shard`` limits the answer to one rank's copies.
        """
        return lookup.locate(self._state, namespace_id, hashes, first, shard)

    def explain(self, namespace_id: bytes, block_hash: bytes) -> MissReason | None:
        """Why the block cannot be matched; None when it can."""
        return lookup.explain(self._state, self._state.entry(namespace_id), block_hash)

    def explain_block(self, namespace_id: bytes, block_hash: bytes) -> Explanation:
        """All that is known of why the block can or cannot be matched, for people; nothing is touched."""
        return explaining.explain_block(self._state, self._state.entry(namespace_id), block_hash)

    def memory(self) -> Memory:
        """How far back removed blocks are remembered."""
        return explaining.memory(self._state)

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
        """Reserve places for blocks ``first``… of a chain, evicting what must go.

        Args:
            namespace_id: Their namespace.
            hashes: The chain, packed: from its root, or from below ``parent``.
            first: The first block to store; the ones before it must be stored or in flight.
            parent: Hash of the block above ``hashes``, when the chain is not given from its root.
            owner: Whose writes these are.
            ttl_s: Blocks not committed by then are freed for others.

        Raises:
            InvalidHashError: As `match`, or more than `RESERVE_BLOCKS_MAX` blocks from ``first``.
            NamespaceMismatchError: A block is stored below another parent.
            UnknownNamespaceError: The namespace is not open.
        """
        return writing.reserve(self._state, namespace_id, hashes, first, parent, owner, ttl_s)

    def commit(self, reservation: int, segment_id: bytes, written: list[Committed]) -> list[CommitStatus]:
        """Shards written on a segment; a block turns visible with its last shard, if its parent is.

        Comes from the segment's node. STALE means that the reservation lost the block: the node frees the slot.
        """
        return writing.commit(self._state, reservation, segment_id, written)

    def abort(self, reservation: int, hashes: list[bytes] | None = None, *, crowded: bool = False) -> int:
        """Give blocks in flight (all of them by default, all shards of each) back; returns how many.

        ``crowded`` says that a node had the bytes but no extent long enough: room is made there for another try.
        """
        return writing.abort(self._state, reservation, hashes, crowded=crowded)

    def expire(self) -> None:
        """Free abandoned reservations and forget leases that ran out; `reserve` does it too."""
        self._state.expire()

    # Copies between nodes

    def copy(self, number: int) -> Copy | None:
        """The open copy that an order to fetch names, to read only."""
        return self._state.copies.get(number)

    def demand(self) -> Demand:
        """What was read lately; counting it needs no lock."""
        return self._state.heat.demand(self._state.now_us())

    def replicate(self, run: HotRun, ttl_s: float) -> int:
        """Order one copy of what is hot, if there is a node for it; the blocks ordered, 0 when there is no more to do.

        A node that does not commit them within ``ttl_s`` gives them up.
        """
        return replicating.replicate(self._state, run, ttl_s)

    @property
    def tiers_wait(self) -> bool:
        """Whether anything may wait to be copied between memory and disk."""
        return tiering.has_work(self._state)

    def move_tiers(self, ttl_s: float) -> int:
        """Order one copy from memory to disk or back; the blocks ordered, 0 when there is no more to do now."""
        return tiering.advance(self._state, ttl_s)

    def survey(self, node_id: str) -> Survey:
        """What lies on a node, as it is now; putting it in order needs no lock."""
        return draining.survey(self._state, node_id)

    def advance(self, drain: Drain, ttl_s: float) -> bool:
        """Order the next copy of a drain; whether there may be another one at once."""
        return draining.advance(self._state, drain, ttl_s)

    def is_idle(self, drain: Drain) -> bool:
        """Whether a pass of the drain has come to its end."""
        return draining.is_idle(self._state, drain)

    # Operators

    def pin(self, namespace_id: bytes, block_hash: bytes, ttl_s: float | None = None) -> bool:
        """Keep a block and its ancestors from eviction for ``ttl_s`` (soft) or until unpinned (hard).

        A later pin of the same block replaces an earlier one, shorter or longer.

        Raises:
            QuotaError: The block's tenant has as many blocks pinned as it may.
        """
        row = self._row(namespace_id, block_hash)
        if row == NIL:
            return False
        now_us = self._state.now_us()
        self._state.pins.expire(now_us)
        self._state.pins.pin(row, FOREVER_US if ttl_s is None else now_us + microseconds(ttl_s))
        self._state.policy.changed(row)
        return True

    def unpin(self, namespace_id: bytes, block_hash: bytes) -> bool:
        """Undo `pin`; leases stay as they are. False for a block that is not pinned, or no longer."""
        row = self._row(namespace_id, block_hash)
        self._state.pins.expire(self._state.now_us())
        if not self._state.pins.unpin(row):
            return False
        self._state.policy.changed(row)
        return True

    def stats(self) -> DirectoryStats:
        """Counts and bytes now."""
        state, counts = self._state, self._state.counts
        return DirectoryStats(
            namespaces=len(state.entries),
            blocks=state.blocks.live,
            capacity_bytes=state.placements.memory.capacity_bytes,
            used_bytes=state.placements.memory.used_bytes,
            disk_capacity_bytes=state.placements.disk.capacity_bytes,
            disk_used_bytes=state.placements.disk.used_bytes,
            reservations=len(state.reservations),
            leases=len(state.leases),
            leased_bytes=state.leases.held_bytes,
            orders_pending=sum(len(outbox) for outbox in state.outboxes.values()),
            surplus_blocks=sum(segment.surplus_blocks for segment in state.placements.segments.values()),
            surplus_bytes=state.placements.memory.surplus_bytes + state.placements.disk.surplus_bytes,
            copies=len(state.copies),
            blocks_asked=sum(entry.asked_blocks for entry in state.entries),
            blocks_matched=sum(entry.matched_blocks for entry in state.entries),
            **{name: counts[name] for name in COUNTS},
        )

    def lookup_stats(self) -> LookupStats:
        """What look-ups asked for and found."""
        entries = self._state.entries
        return LookupStats(
            asked_tokens=sum(entry.asked_blocks * entry.namespace.block_tokens for entry in entries),
            matched_tokens=sum(entry.matched_blocks * entry.namespace.block_tokens for entry in entries),
            misses=self.misses(),
        )

    # Tenants

    def tenants(self) -> list[TenantStats]:
        """What each tenant may hold, holds, and was refused, by name."""
        return self._state.tenants.stats(self._state.placements.memory.capacity_bytes)

    def limits(self, tenant: str) -> TenantLimits:
        """The limits of a tenant, whether it has come or not."""
        return self._state.tenants.limits(tenant)

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Give a tenant limits of its own, from now on; `trim` brings it below a lower quota.

        Raises:
            CapacityError: Too many tenants have limits of their own.
        """
        self._state.tenants.set_limits(tenant, limits)

    def trim(self, most: int) -> bool:
        """Evict up to ``most`` blocks of tenants above their quota; whether there may be more to do now."""
        return quotas.trim(self._state, most)

    def misses(self) -> dict[MissReason, int]:
        """Look-ups that ended early, by why."""
        return {reason: self._state.misses[reason] for reason in MissReason}

    @property
    def view(self) -> View:
        """What people look at."""
        return View(self._state)

    def check_integrity(self) -> None:
        """Assert the invariants that tables, links and accounts must keep; for tests and idle times."""
        checking.check_integrity(self._state)

    def _drop(
        self,
        segment_id: bytes,
        namespace_id: bytes,
        block_hash: bytes,
        slot: int,
        generation: int,
        reason: MissReason,
        cause: Cause,
        *,
        order: bool,
    ) -> bool:
        segment = self._state.segments_by_id.get(segment_id)
        if segment is None:
            return False
        entry = self._state.entry(namespace_id)
        return losing.gone(self._state, segment, entry, block_hash, slot, generation, reason, cause, order=order)

    def _row(self, namespace_id: bytes, block_hash: bytes) -> int:
        entry = self._state.entry(namespace_id)
        return self._state.chains.indexes[entry.number].get(block_hash, NIL)
