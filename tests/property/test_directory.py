"""The directory against nodes that hold the slots: whatever happens, what it says and what they hold agree.

The oracles are the fake nodes (which slots there are) and the model's own record of reservations, leases and pins. Only
the order of eviction is checked against the directory's tables, through `inspect_directory`.
"""

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from kvpool.core.directory import Copy, MissReason
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.tenants import TenantLimits

from .directory_model import CHAINS, NAMESPACES, OF_TENANTS, PARENTS, DirectoryModel, Tokens, Write, slot_bytes
from .inspect_directory import hot_run, open_copies

names = st.sampled_from(("small", "small", "sharded"))
chains = st.sampled_from(tuple(CHAINS))
picks = st.integers(0, 1_000_000)


class DirectoryMachine(RuleBasedStateMachine):
    """Writers, readers, operators and nodes in any order."""

    age_slack = 0.0
    with_disks = False
    policy = "lru"
    namespaces = NAMESPACES
    writes = Bundle("writes")
    copies = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.make_pool()
        self.directory = self.pool.directory
        self.follow()
        self.followed: dict[bytes, set[bytes]] = {namespace_id: set() for namespace_id in self.pool.namespaces}
        self.applied = {"node-0": 0, "node-1": 0}

    def make_pool(self) -> DirectoryModel:
        return DirectoryModel(
            self.age_slack, with_disks=self.with_disks, policy=self.policy, namespaces=self.namespaces
        )

    def follow(self) -> None:
        self.directory.following.begin(lambda: None)

    @initialize(work=st.lists(chains, min_size=2, max_size=6))
    def work(self, work: list[Tokens]) -> None:
        """A pool that was used for a while."""
        self.store_all("small", work)

    # Writers

    @rule(target=writes, name=names, tokens=chains, pick=picks, cut=picks, ttl_s=st.sampled_from((5.0, 30.0)))
    def reserve(self, name: str, tokens: Tokens, pick: int, cut: int, ttl_s: float):
        """From the root or from a known parent, all of the chain or its end."""
        hashes = CHAINS[tokens]
        first = pick % len(hashes) if pick % 3 == 0 else 0
        write = self.pool.reserve(self.namespaces[name], hashes, cut % (first + 1), first, ttl_s)
        return write or multiple()

    @rule(name=names, work=st.lists(chains, min_size=1, max_size=4))
    def store_all(self, name: str, work: list[Tokens]) -> None:
        """Writers that do everything right, one after the other."""
        for tokens in work:
            write = self.pool.reserve(self.namespaces[name], CHAINS[tokens], 0, 0, 30.0)
            if write:
                self.pool.commit(write, write.places)
            self.pool.clock.advance(0.01)

    @rule(write=writes, pick=picks)
    def commit(self, write: Write, pick: int) -> None:
        """Some of the shards, perhaps late, perhaps again."""
        chosen = [place for i, place in enumerate(write.places) if pick >> i & 1]
        self.pool.commit(write, chosen or write.places)

    @rule(write=writes, other=writes)
    def commit_for_another(self, write: Write, other: Write) -> None:
        """A writer names a reservation that never owned what it wrote."""
        self.pool.commit(other, [place for place in write.places if place not in other.pending])

    @rule(write=writes, pick=picks, crowded=st.booleans())
    def abort(self, write: Write, pick: int, crowded: bool) -> None:
        """All, or blocks of some shards, so that a block may be named twice."""
        hashes = [place[0] for i, place in enumerate(write.places) if pick >> i & 1]
        self.pool.abort(write, hashes, crowded=crowded)

    # Readers

    @rule(name=names, tokens=chains, pick=picks, lease_s=st.sampled_from((0.0, 0.0, 2.0, 10.0)))
    def match(self, name: str, tokens: Tokens, pick: int, lease_s: float) -> None:
        namespace = self.namespaces[name]
        hashes = self.pool.some_chain(namespace, tokens, pick)
        expected, leased_bytes = self.pool.count_visible(namespace, hashes), self.directory.stats().leased_bytes
        first = pick % len(hashes) if pick & 8 else 0
        matched = self.directory.match(namespace.id, b"".join(hashes), first, lease_s)
        self.pool.check_matched(matched.blocks, expected, lease_s, leased_bytes)
        assert (matched.reason is None) == (matched.blocks == len(hashes) or matched.blocks < expected)
        assert bool(matched.lease) == (lease_s > 0 and matched.blocks > first)
        if matched.lease:
            self.pool.lease(matched.lease, namespace, hashes[: matched.blocks], lease_s)

    @precondition(lambda self: self.pool.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        lease = self.pool.leases.pop(pick % len(self.pool.leases))
        assert self.directory.release(lease.number) or not lease.hashes
        assert not self.directory.release(lease.number)

    @rule(name=names, tokens=chains, pick=picks)
    def locate(self, name: str, tokens: Tokens, pick: int) -> None:
        namespace = self.namespaces[name]
        hashes = self.pool.some_chain(namespace, tokens, pick)
        first, shard = pick % len(hashes), pick % namespace.shards if pick & 1 else None
        found = self.directory.locate(namespace.id, b"".join(hashes), first, shard)
        assert found.blocks == max(0, self.pool.count_visible(namespace, hashes) - first)
        shards = range(namespace.shards) if shard is None else [shard]
        copies = list(zip(found.block, found.shard, found.segment, found.slot, found.generation, strict=True))
        assert {(block, of_shard) for block, of_shard, *_ in copies} == set(product(range(found.blocks), shards))
        for (block, of_shard, number, slot, generation), checksum in zip(copies, found.checksum, strict=True):
            held = self.pool.online[number].held[slot]
            assert (held.hash, held.shard) == (hashes[first + block], of_shard)
            assert (held.generation, held.checksum) == (generation, checksum)

    # Copies

    @rule(target=copies, name=names, tokens=chains, pick=picks)
    def replicate(self, name: str, tokens: Tokens, pick: int):
        """Something is hot."""
        namespace, before = self.namespaces[name], open_copies(self.directory)
        hashes = self.pool.some_chain(namespace, tokens, pick)
        blocks = self.directory.replicate(hot_run(self.directory, namespace, hashes, 2 + pick % 2), 30.0)
        ordered = [copy for copy in open_copies(self.directory) if copy not in before]
        assert sum(len(copy.rows) for copy in ordered) == blocks
        return multiple(*ordered)

    @rule(name=names, work=st.lists(chains, min_size=1, max_size=4))
    def copy_all(self, name: str, work: list[Tokens]) -> None:
        """Nodes that fetch at once what is hot."""
        namespace = self.namespaces[name]
        for tokens in work:
            while self.directory.replicate(hot_run(self.directory, namespace, CHAINS[tokens], 2), 30.0):
                copy = open_copies(self.directory)[-1]
                self.pool.fetch(copy, copy.hashes)

    @rule(target=copies, node_id=st.sampled_from(("node-0", "node-1")))
    def drain(self, node_id: str):
        before = open_copies(self.directory)
        drain = self.pool.drain(node_id)
        ordered = [copy for copy in open_copies(self.directory) if copy not in before]
        assert sum(len(copy.rows) for copy in ordered) == drain.ordered
        return multiple(*ordered)

    @rule(copy=copies, pick=picks)
    def fetch(self, copy: Copy, pick: int) -> None:
        """Some of its blocks, perhaps late, perhaps again."""
        self.pool.fetch(copy, [h for i, h in enumerate(copy.hashes) if pick >> i & 1] or copy.hashes)

    @rule(copy=copies, pick=picks)
    def give_up(self, copy: Copy, pick: int) -> None:
        hashes = [h for i, h in enumerate(copy.hashes) if pick >> i & 1]
        expected = [h for h in hashes or copy.hashes if h in copy.rows]
        assert self.directory.abort(copy.number, hashes or None) == len(expected)

    # Time

    @rule(seconds=st.sampled_from((0.001, 0.1, 1.0, 3.0, 6.0, 31.0)))
    def wait(self, seconds: float) -> None:
        self.pool.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        self.directory.expire()
        self.pool.expire()

    # Operators

    @rule(name=names, tokens=chains, pick=picks, ttl_s=st.sampled_from((None, 1.0, 10.0)))
    def pin(self, name: str, tokens: Tokens, pick: int, ttl_s: float | None) -> None:
        namespace = self.namespaces[name]
        self.pool.pin((namespace.id, self.pool.some_chain(namespace, tokens, pick)[-1]), ttl_s)

    @precondition(lambda self: self.pool.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        key = sorted(self.pool.pins)[pick % len(self.pool.pins)]
        assert self.directory.unpin(*key) == (self.pool.pins.pop(key) > self.pool.now_us())
        assert not self.directory.unpin(*key)

    @rule(pick=picks, accepting=st.booleans())
    def set_accepting(self, pick: int, accepting: bool) -> None:
        segment = self.pool.segments[pick % len(self.pool.segments)]
        if segment.number in self.pool.online:
            self.directory.set_accepting(segment.segment_id, accepting=accepting)

    # Nodes

    @rule(pick=picks, bad=st.booleans())
    def lose_slot(self, pick: int, bad: bool) -> None:
        """The node misses a slot, or a reader finds it corrupt. A second report finds nothing."""
        live = [(segment, slot) for segment in self.pool.online.values() for slot in self.pool.live(segment)]
        if not live:
            return
        segment, slot = live[pick % len(live)]
        named = (segment.segment_id, slot.namespace.id, slot.hash, slot.slot, slot.generation)
        if bad:
            assert self.directory.report_bad(*named)
            assert (slot.slot, slot.generation) in self.pool.ordered(segment)
        else:
            segment.free(slot.slot, slot.generation)
            assert self.directory.gone(*named)
        assert not self.directory.gone(*named)
        self.pool.lost_by_force({(slot.namespace.id, slot.hash)})

    @rule(pick=picks)
    def lose_segment(self, pick: int) -> None:
        segment = self.pool.segments[pick % len(self.pool.segments)]
        if segment.number not in self.pool.online:
            assert self.directory.lose_segment(segment.segment_id) == 0
            return
        held = [(slot.namespace.id, slot.hash) for slot in self.pool.live(segment)]
        promised = [
            (w.namespace.id, h) for w in self.pool.open for h, _, number in w.pending if number == segment.number
        ]
        del self.pool.online[segment.number]
        assert self.directory.lose_segment(segment.segment_id) == len(held) + len(promised)
        while self.directory.drop_lost(1 + pick % 3):
            self.directory.check_integrity()
        self.pool.lost_by_force({*held, *promised})

    @precondition(lambda self: len(self.pool.online) < len(self.pool.segments))
    @rule()
    def rejoin(self) -> None:
        """A lost segment comes back, saying which orders its node has applied."""
        segment = next(segment for segment in self.pool.segments if segment.number not in self.pool.online)
        self.directory.acknowledge(segment.node_id, self.applied[segment.node_id])
        self.pool.join(segment)

    @precondition(lambda self: any(self.pool.unannounced.values()))
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        """Part of the inventories, in any order."""
        for segment in self.pool.online.values():
            unannounced = self.pool.unannounced[segment.segment_id]
            slots = [s for s in segment.held.values() if (s.slot, s.generation) in unannounced]
            if slots:
                slots = data.draw(st.permutations(slots))[: data.draw(st.integers(1, len(slots)))]
            for namespace in self.namespaces.values():
                self.pool.announce(segment, namespace, [s for s in slots if s.namespace is namespace])

    @rule(node_id=st.sampled_from(("node-0", "node-1")), most=st.integers(1, 20), acknowledges=st.booleans())
    def obey(self, node_id: str, most: int, acknowledges: bool) -> None:
        """The node applies its next orders; its answer may get lost."""
        orders = self.directory.orders(node_id, self.applied[node_id], most)
        numbers = [order.number for order in orders]  # with gaps: a later order for a slot takes an earlier one's place
        assert numbers == sorted(set(numbers))
        assert all(number > self.applied[node_id] for number in numbers)
        for segment in self.pool.segments:
            if segment.node_id == node_id:
                segment.apply(orders)
        self.applied[node_id] = max([self.applied[node_id], *numbers])
        if acknowledges:
            self.directory.acknowledge(node_id, self.applied[node_id])
            assert all(order.number > self.applied[node_id] for order in self.directory.orders(node_id))

    # Invariants

    @invariant()
    def is_sound(self) -> None:
        self.directory.check_integrity()

    @invariant()
    def says_visible_what_nodes_hold_up_to_the_root(self) -> None:
        """So visible blocks are prefix-closed, dormant ones wake, and no visible slot is free."""
        for namespace in self.namespaces.values():
            visible = self.pool.visible(namespace)
            in_flight = {h for write in self.pool.open if write.namespace is namespace for h in write.in_flight}
            for block_hash in PARENTS:
                reason = self.directory.explain(namespace.id, block_hash)
                assert self.directory.explain_block(namespace.id, block_hash).reason == reason
                assert (reason is None) == (block_hash in visible)
                assert (reason == MissReason.IN_FLIGHT) == (block_hash in in_flight)

    @invariant()
    def tells_followers_what_is_visible(self) -> None:
        """Each change is one, parents come before their children, and all parts together are what is visible."""
        ids = [namespace.id for namespace in self.directory.namespaces()]
        changes = self.directory.following.take().changes
        for number, block_hash, parent in zip(changes.namespaces, changes.hashes, changes.parents, strict=True):
            seen = self.followed[ids[number]]
            assert (block_hash in seen) == (parent is None)
            assert not parent or parent in seen
            seen.symmetric_difference_update({block_hash})
        for namespace in self.pool.namespaces.values():
            assert self.followed[namespace.id] == self.pool.visible(namespace)
        first: int | None = 0
        found: list[tuple[bytes, bytes, bytes | None]] = []
        while first is not None:
            part = self.directory.following.visible(first, 7)
            namespaces = [ids[number] for number in part.changes.namespaces]
            found += zip(namespaces, part.changes.hashes, part.changes.parents, strict=True)
            first = part.following
        assert sorted(found) == sorted((n, h, PARENTS[h]) for n, seen in self.followed.items() for h in seen)

    @invariant()
    def accounts_for_every_byte(self) -> None:
        """Bytes used are what nodes hold and open reservations were promised; abandoned ones gave theirs back."""
        promised: dict[int, int] = defaultdict(int)
        of_tenants: dict[tuple[str, bool], int] = defaultdict(int)
        for write in self.pool.open:
            for _, _, number in write.pending:
                promised[number] += slot_bytes(write.namespace)
                of_tenants[write.namespace.tenant, False] += slot_bytes(write.namespace)
        for copy in self.pool.open_copies():
            namespace = self.directory.namespaces()[copy.namespace]
            promised[copy.destination.number] += len(copy.rows) * slot_bytes(namespace)
            of_tenants[namespace.tenant, copy.destination.is_disk] += len(copy.rows) * slot_bytes(namespace)
        for segment in self.directory.segments():
            held = self.pool.live(self.pool.online[segment.number])
            for slot in held:
                of_tenants[slot.namespace.tenant, segment.is_disk] += slot.size_bytes
            held_bytes = sum(slot.size_bytes for slot in held)
            assert segment.used_bytes == held_bytes + promised[segment.number]
            assert segment.used_bytes <= segment.capacity_bytes
        for tenant in self.directory.tenants():
            assert tenant.used_bytes == of_tenants[tenant.name, False]
            assert tenant.disk_used_bytes == of_tenants[tenant.name, True]
        self.pool.open = [write for write in self.pool.open if write.pending]
        assert self.directory.stats().reservations == len(self.pool.open)

    @invariant()
    def keeps_leased_blocks(self) -> None:
        self.pool.leases = [lease for lease in self.pool.leases if lease.until_us > self.pool.now_us()]
        for lease in self.pool.leases:
            assert self.pool.count_visible(lease.namespace, lease.hashes) == len(lease.hashes)


class TieredDirectoryMachine(DirectoryMachine):
    """Nodes with disks: what was read goes there, and comes back when it is read there."""

    with_disks = True

    @rule(target=DirectoryMachine.copies)
    def move_tiers(self):
        before = open_copies(self.directory)
        blocks = self.directory.move_tiers(30.0)
        ordered = [copy for copy in open_copies(self.directory) if copy not in before]
        assert sum(len(copy.rows) for copy in ordered) == blocks
        assert all(copy.source.node_id == copy.destination.node_id for copy in ordered)
        assert all(copy.source.is_disk != copy.destination.is_disk for copy in ordered)
        self.pool.lost_by_force(set())
        return multiple(*ordered)

    @initialize(work=st.lists(chains, min_size=4, max_size=10))
    def work(self, work: list[Tokens]) -> None:
        """A pool that was used for a while, with more than its memory holds."""
        self.use("small", work)
        self.use("small", work[:3])

    @rule(name=names, work=st.lists(chains, min_size=1, max_size=6))
    def use(self, name: str, work: list[Tokens]) -> None:
        """Engines that read what is there and store the rest, and nodes that copy at once what is to be copied."""
        namespace = self.namespaces[name]
        for tokens in work:
            self.store_all(name, [tokens])
            self.directory.locate(namespace.id, b"".join(CHAINS[tokens]))
            while self.directory.move_tiers(30.0):
                copy = open_copies(self.directory)[-1]
                self.pool.fetch(copy, copy.hashes)
            self.pool.lost_by_force(set())

    @rule(tokens=chains, pick=picks)
    def use_what_is_there(self, tokens: Tokens, pick: int) -> None:
        found = self.pool.some_chain(self.namespaces["small"], tokens, pick)
        self.use("small", [next(tokens for tokens, hashes in CHAINS.items() if hashes == found)])

    @invariant()
    def writes_nothing_new_to_disk(self) -> None:
        in_flight = {place[2] for write in self.pool.open for place in write.pending}
        assert not any(self.directory.segment(number).is_disk for number in in_flight)


class RelaxedDirectoryMachine(DirectoryMachine):
    """The same with the default slack, which keeps chains together at the price of exact order."""

    age_slack = 0.05


class TenantsDirectoryMachine(DirectoryMachine):
    """The two namespaces are of two tenants, with quotas and shares that change."""

    namespaces = OF_TENANTS

    @rule(name=names, pages=st.sampled_from((None, None, 4, 8, 15)), share=st.sampled_from((0.5, 1.0, 1.0, 3.0)))
    def set_limits(self, name: str, pages: int | None, share: float) -> None:
        size_bytes = None if pages is None else pages * PAGE_BYTES
        self.directory.set_limits(name, TenantLimits(bytes=size_bytes, share=share))

    @rule(most=st.integers(0, 4))
    def trim(self, most: int) -> None:
        """What is above a quota goes in slices, and of nobody else anything."""
        before = {tenant.name: tenant for tenant in self.directory.tenants()}
        self.directory.trim(most)
        for tenant in self.directory.tenants():
            quota_bytes, held_bytes = tenant.limits.bytes, before[tenant.name].used_bytes
            may_give = quota_bytes is not None and held_bytes > quota_bytes
            assert tenant.used_bytes == held_bytes or may_give
        self.pool.lost_by_force(set())


# Shrinking a failure takes longer than a test may.
class LearningDirectoryMachine(DirectoryMachine):
    """A policy that learns decides what goes; everything else holds as it does for LRU."""

    policy = "default"


TestDirectory = pytest.mark.timeout(900)(DirectoryMachine.TestCase)
TestTieredDirectory = pytest.mark.timeout(900)(TieredDirectoryMachine.TestCase)
# Each of its steps does the work of several.
TieredDirectoryMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 4)
TestLearningDirectory = pytest.mark.timeout(900)(LearningDirectoryMachine.TestCase)
TenantsDirectoryMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 3)
TestTenantsDirectory = pytest.mark.timeout(900)(TenantsDirectoryMachine.TestCase)
TestRelaxedDirectory = pytest.mark.timeout(900)(RelaxedDirectoryMachine.TestCase)
