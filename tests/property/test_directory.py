"""The directory against nodes that hold the slots: whatever happens, what it says and what they hold agree.

The oracles are the fake nodes (which slots there are) and the test's own record of reservations, leases and pins. Only
the order of eviction is checked against the directory's tables, through `inspect_directory`.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product

from fake_node import FakeSegment, HeldSlot, chain, make_namespace
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from kvpool.core.clock import microseconds
from kvpool.core.directory import (
    BlockState,
    CommitStatus,
    Directory,
    DirectoryConfig,
    FreeSlot,
    MissReason,
    ReserveResult,
    Want,
)
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.namespace import Namespace
from kvpool.testing import ManualClock

from .inspect_directory import BlockView, Key, inspect

NAMESPACES = {"small": make_namespace(), "sharded": make_namespace(pages=2, shards=2)}
SEGMENTS = (("node-0", 9), ("node-0", 6), ("node-1", 7))
"""(node, pages): far too little for `CHAINS`, so that most reserves evict."""

CHAINS = {tokens: chain(*tokens) for depth in range(5, 0, -1) for tokens in product((0, 1), repeat=depth)}
"""All chains of a small tree: any two share the blocks of their common prefix."""

KNOWN = {hashes[-1]: (hashes[-2] if len(hashes) > 1 else b"") for hashes in reversed(CHAINS.values())}
"""Parent of every block, parents before children."""

names = st.sampled_from(("small", "small", "sharded"))
chains = st.sampled_from(tuple(CHAINS))
picks = st.integers(0, 1_000_000)

Tokens = tuple[int, ...]
Place = tuple[bytes, int, int]
"""(hash, shard, segment number)."""


@dataclass
class Write:
    """What the test knows of one reservation."""

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
        self.pending = {place for place in self.pending if place[0] != block_hash}


@dataclass
class Lease:
    """Blocks that a match promised to keep."""

    namespace: Namespace
    hashes: list[bytes]
    until_us: int


class DirectoryMachine(RuleBasedStateMachine):
    """Writers, readers, operators and nodes in any order."""

    age_slack = 0.0
    writes = Bundle("writes")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.config = DirectoryConfig(age_slack=self.age_slack)
        self.directory = Directory(self.clock, self.config)
        self.segments = [
            FakeSegment(bytes([i]) * 16, node_id, pages * PAGE_BYTES) for i, (node_id, pages) in enumerate(SEGMENTS)
        ]
        self.online: dict[int, FakeSegment] = {}
        self.unannounced: dict[bytes, set[tuple[int, int]]] = defaultdict(set)
        self.applied = dict.fromkeys(("node-0", "node-1"), 0)
        self.open: list[Write] = []
        self.leases: list[Lease] = []
        self.pins: dict[Key, int] = {}
        for namespace in NAMESPACES.values():
            self.directory.open_namespace(namespace)
        for segment in self.segments:
            self._join(segment)

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
        cut = cut % (first + 1)
        return self._reserve(NAMESPACES[name], hashes, cut, first, ttl_s)

    @rule(name=names, work=st.lists(chains, min_size=1, max_size=4))
    def store_all(self, name: str, work: list[Tokens]) -> None:
        """Writers that do everything right, one after the other."""
        for tokens in work:
            write = self._reserve(NAMESPACES[name], CHAINS[tokens], 0, 0, 30.0)
            if isinstance(write, Write):
                self._commit(write, write.number, write.places)
            self.clock.advance(0.01)

    @rule(write=writes, pick=picks)
    def commit(self, write: Write, pick: int) -> None:
        """Some of the shards, perhaps late, perhaps again."""
        chosen = [place for i, place in enumerate(write.places) if pick >> i & 1] or write.places
        self._commit(write, write.number, chosen)

    @rule(write=writes, other=writes)
    def commit_with_another_number(self, write: Write, other: Write) -> None:
        self._commit(other, other.number, [place for place in write.places if place not in other.pending])

    @rule(write=writes, pick=picks)
    def abort(self, write: Write, pick: int) -> None:
        hashes = [place[0] for i, place in enumerate(write.places) if pick >> i & 1]
        expected = write.in_flight & set(hashes) if hashes else write.in_flight
        assert self.directory.abort(write.number, hashes or None) == len(expected)
        for block_hash in expected:
            write.drop(block_hash)
        self._forget_pins()

    # Readers

    @rule(name=names, tokens=chains, pick=picks, lease_s=st.sampled_from((0.0, 0.0, 2.0, 10.0)))
    def match(self, name: str, tokens: Tokens, pick: int, lease_s: float) -> None:
        namespace = NAMESPACES[name]
        hashes = self._some_chain(namespace, tokens, pick)
        expected, leased_bytes = self._count_visible(namespace, hashes), self.directory.stats().leased_bytes
        matched = self.directory.match(namespace.id, b"".join(hashes), lease_s)
        self._check_matched(matched.blocks, expected, lease_s, leased_bytes)
        assert (matched.reason is None) == (matched.blocks == len(hashes) or matched.blocks < expected)
        self._lease(namespace, hashes[: matched.blocks], lease_s)

    @rule(name=names, tokens=chains, pick=picks, lease_s=st.sampled_from((0.0, 2.0)))
    def locate(self, name: str, tokens: Tokens, pick: int, lease_s: float) -> None:
        namespace = NAMESPACES[name]
        hashes = self._some_chain(namespace, tokens, pick)
        expected, leased_bytes = self._count_visible(namespace, hashes), self.directory.stats().leased_bytes
        first = pick % len(hashes)
        shard = pick % namespace.shards if pick & 1 else None
        found = self.directory.locate(namespace.id, b"".join(hashes), first, shard, lease_s)
        if expected > first:
            self._check_matched(first + found.blocks, max(expected, first), lease_s, leased_bytes)
        else:
            assert found.blocks == 0
        shards = {shard} if shard is not None else set(range(namespace.shards))
        copies = list(zip(found.block, found.shard, found.segment, found.slot, found.generation, strict=True))
        assert {(int(b), int(s)) for b, s, *_ in copies} == set(product(range(found.blocks), shards))
        for (block, of_shard, number, slot, generation), checksum in zip(copies, found.checksum, strict=True):
            held = self.online[number].held[slot]
            assert (held.hash, held.shard) == (hashes[first + block], of_shard)
            assert (held.generation, held.checksum) == (generation, checksum)
        if found.blocks:
            self._lease(namespace, hashes[: first + found.blocks], lease_s)

    # Time

    @rule(seconds=st.sampled_from((0.001, 0.1, 1.0, 3.0, 6.0, 31.0)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        self.directory.expire()
        self._expire()

    # Operators

    @rule(name=names, tokens=chains, pick=picks, ttl_s=st.sampled_from((None, 1.0, 10.0)))
    def pin(self, name: str, tokens: Tokens, pick: int, ttl_s: float | None) -> None:
        namespace = NAMESPACES[name]
        key = (namespace.id, self._some_chain(namespace, tokens, pick)[-1])
        assert self.directory.pin(*key, ttl_s) == (key in inspect(self.directory))
        self.pins[key] = 1 << 62 if ttl_s is None else self._now_us() + microseconds(ttl_s)
        self._forget_pins()

    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        if self.pins:
            key = sorted(self.pins)[pick % len(self.pins)]
            del self.pins[key]
            assert self.directory.unpin(*key)
            assert not self.directory.unpin(*key)

    @rule(pick=picks, accepting=st.booleans())
    def set_accepting(self, pick: int, accepting: bool) -> None:
        segment = self.segments[pick % len(self.segments)]
        if segment.number in self.online:
            self.directory.set_accepting(segment.segment_id, accepting=accepting)

    # Nodes

    @rule(pick=picks, bad=st.booleans())
    def lose_slot(self, pick: int, bad: bool) -> None:
        """The node misses a slot, or a reader finds it corrupt. A second report finds nothing."""
        live = [(segment, slot) for segment in self.online.values() for slot in self._live(segment)]
        if not live:
            return
        segment, slot = live[pick % len(live)]
        named = (segment.segment_id, slot.namespace.id, slot.hash, slot.slot, slot.generation)
        if bad:
            assert self.directory.report_bad(*named)
            assert self.directory.orders(segment.node_id, most=10_000)[-1].rest
        else:
            segment.free(slot.slot, slot.generation)
            assert self.directory.gone(*named)
        assert not self.directory.gone(*named)
        self._lost_by_force({(slot.namespace.id, slot.hash)})

    @rule(pick=picks)
    def lose_segment(self, pick: int) -> None:
        segment = self.segments[pick % len(self.segments)]
        if segment.number not in self.online:
            assert self.directory.lose_segment(segment.segment_id) == 0
            return
        live = self._live(segment)
        lost = {(slot.namespace.id, slot.hash) for slot in live}
        reserved = [(w.namespace.id, h) for w in self.open for h, _, number in w.pending if number == segment.number]
        del self.online[segment.number]
        assert self.directory.lose_segment(segment.segment_id) == len(live) + len(reserved)
        self._lost_by_force(lost | set(reserved))

    @precondition(lambda self: len(self.online) < len(self.segments))
    @rule()
    def rejoin(self) -> None:
        segment = next(segment for segment in self.segments if segment.number not in self.online)
        self.directory.acknowledge(segment.node_id, self.applied[segment.node_id])
        self._join(segment)
        self.unannounced[segment.segment_id] = {(slot.slot, slot.generation) for slot in segment.held.values()}

    @precondition(lambda self: any(self.unannounced.values()))
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        """Part of an inventory, in any order."""
        for segment in self.online.values():
            slots = [s for s in segment.held.values() if (s.slot, s.generation) in self.unannounced[segment.segment_id]]
            if slots:
                slots = data.draw(st.permutations(slots))[: data.draw(st.integers(1, len(slots)))]
            for namespace in NAMESPACES.values():
                self._announce(segment, namespace, [s for s in slots if s.namespace is namespace])

    @rule(node_id=st.sampled_from(("node-0", "node-1")), most=st.integers(1, 20), acknowledges=st.booleans())
    def obey(self, node_id: str, most: int, acknowledges: bool) -> None:
        """The node applies its next orders; its answer may get lost."""
        orders = self.directory.orders(node_id, self.applied[node_id], most)
        assert [order.number for order in orders] == sorted({order.number for order in orders})
        for segment in self.segments:
            if segment.node_id == node_id:
                segment.apply(orders)
        if orders:
            self.applied[node_id] = orders[-1].number
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
        for namespace in NAMESPACES.values():
            visible = self._visible(namespace)
            in_flight = {h for w in self.open if w.namespace is namespace for h in w.in_flight}
            for block_hash in KNOWN:
                reason = self.directory.explain(namespace.id, block_hash)
                assert (reason is None) == (block_hash in visible)
                assert (reason == MissReason.IN_FLIGHT) == (block_hash in in_flight)

    @invariant()
    def accounts_for_every_byte(self) -> None:
        """Bytes used are what nodes hold and open reservations were promised; abandoned ones gave theirs back."""
        promised: dict[int, int] = defaultdict(int)
        for write in self.open:
            for _, _, number in write.pending:
                promised[number] += _slot_bytes(write.namespace)
        for segment in self.directory.segments():
            held_bytes = sum(slot.size_bytes for slot in self._live(self.online[segment.number]))
            assert segment.used_bytes == held_bytes + promised[segment.number] <= segment.capacity_bytes
        self.open = [write for write in self.open if write.pending]
        assert self.directory.stats().reservations == len(self.open)

    @invariant()
    def keeps_leased_blocks(self) -> None:
        self.leases = [lease for lease in self.leases if lease.until_us > self._now_us()]
        for lease in self.leases:
            assert self._count_visible(lease.namespace, lease.hashes) == len(lease.hashes)

    # Steps and their checks

    def _reserve(self, namespace: Namespace, hashes: list[bytes], cut: int, first: int, ttl_s: float):
        before, evicted_before = inspect(self.directory), self.directory.stats().evicted_blocks
        parent = hashes[cut - 1] if cut else b""
        packed = b"".join(hashes[cut:])
        result = self.directory.reserve(namespace.id, packed, first - cut, parent, ttl_s=ttl_s)
        self._expire()
        after = inspect(self.directory)
        if result.missing_from is not None:
            self._check_missing(result, namespace, hashes, cut, first, after)
            return multiple()
        asked = hashes[first:]
        write = self._opened(result, namespace, asked, ttl_s)
        self._check_wants(result, write, asked, before, after)
        rewritten = {(namespace.id, h) for h in asked if _is_partial(before.get((namespace.id, h)))}
        evicted = {key for key, block in before.items() if _is_committed(block)} - rewritten
        evicted -= {key for key, block in after.items() if _is_committed(block)}
        assert self.directory.stats().evicted_blocks - evicted_before >= len(evicted)
        refused = list(result.wants).index(Want.NO_ROOM) if Want.NO_ROOM in result.wants else None
        spared = (
            (namespace.id, hashes[first + refused - 1] if first + refused else b"") if refused is not None else None
        )
        self._check_evicted(evicted, spared, before, after)
        if spared is not None:
            self._check_no_room(namespace, spared, after)
        for key in rewritten | evicted:
            self.pins.pop(key, None)
        return write if write.places else multiple()

    def _opened(self, result: ReserveResult, namespace: Namespace, asked: list[bytes], ttl_s: float) -> Write:
        places = [(asked[i], shard, number) for (number, shard), share in result.shares.items() for i in share.indexes]
        victims: dict[int, list[FreeSlot]] = defaultdict(list)
        for (number, _), share in result.shares.items():
            victims[number] += share.victims
        deadline_us = self._now_us() + microseconds(ttl_s)
        write = Write(result.reservation, namespace, deadline_us, places, victims, set(places))
        assert bool(places) == bool(result.reservation)
        if places:
            self.open.append(write)
        return write

    def _check_missing(
        self, result: ReserveResult, namespace: Namespace, hashes: list[bytes], cut: int, first: int, after: dict
    ) -> None:
        present = [(namespace.id, h) in after for h in hashes[:first]]
        expected = -1 if cut and not present[cut - 1] else present.index(False, cut) - cut
        assert (result.missing_from, result.reservation, result.wants, result.shares) == (expected, 0, b"", {})

    def _check_wants(
        self, result: ReserveResult, write: Write, asked: list[bytes], before: dict[Key, BlockView], after: dict
    ) -> None:
        placed = defaultdict(list)
        for block_hash, shard, number in write.places:
            placed[block_hash].append(shard)
            assert self.directory.segment(number).accepts
        for block_hash, want in zip(asked, result.wants, strict=True):
            key = (write.namespace.id, block_hash)
            assert sorted(placed[block_hash]) == (list(range(write.namespace.shards)) if want == Want.WANTED else [])
            if want == Want.EXISTS:
                assert before[key].state > BlockState.IN_FLIGHT
                assert not before[key].missing_shards
            if want == Want.IN_FLIGHT:
                assert before[key].state == BlockState.IN_FLIGHT
            if want != Want.NO_ROOM:
                assert key in after
        refused = list(result.wants).index(Want.NO_ROOM) if Want.NO_ROOM in result.wants else len(asked)
        assert set(result.wants[refused:]) <= {Want.NO_ROOM}

    def _check_evicted(
        self, evicted: set[Key], spared: Key | None, before: dict[Key, BlockView], after: dict[Key, BlockView]
    ) -> None:
        """``spared`` is the parent of a block that found no room: it was no leaf while that was tried."""
        assert not evicted & self._protected(before), "leased and pinned blocks stay, and so do their ancestors"
        for (namespace_id, _), block in after.items():
            assert (namespace_id, block.parent) not in evicted - after.keys(), "leaves go first"
        children: dict[Key, list[Key]] = defaultdict(list)
        for key, block in before.items():
            children[key[0], block.parent].append(key)
        stayed = [b for key, b in after.items() if key in before and key != spared and self._may_go(b)]
        for key in evicted:
            rank, last_use_us = before[key].age_key[0], self._folded(key, before, children, evicted)
            for block in stayed:
                assert rank <= block.age_key[0], "dormant blocks go first"
                if rank == block.age_key[0]:
                    slack_us = self.age_slack * max(0, self._now_us() - block.last_use_us)
                    assert last_use_us <= block.last_use_us + slack_us, "the oldest leaf of the pool goes first"

    def _check_no_room(self, namespace: Namespace, spared: Key, after: dict[Key, BlockView]) -> None:
        """Nothing that could have gone stayed."""
        assert {key for key, block in after.items() if self._may_go(block)} <= {spared}
        if namespace.shards == 1:
            free_bytes = [segment.free_bytes for segment in self.directory.segments() if segment.accepts]
            assert max(free_bytes, default=0) < _slot_bytes(namespace)

    def _may_go(self, block: BlockView) -> bool:
        return block.is_evictable(self._now_us()) and self.directory.segment(block.home_segment).accepts

    def _folded(self, key: Key, before: dict[Key, BlockView], children: dict, evicted: set[Key]) -> int:
        """Last use of a block at its eviction, when what was below it had gone before."""
        below = [self._folded(child, before, children, evicted) for child in children[key] if child in evicted]
        return max([before[key].last_use_us, *below])

    def _protected(self, before: dict[Key, BlockView]) -> set[Key]:
        now_us = self._now_us()
        keys = {(lease.namespace.id, h) for lease in self.leases if lease.until_us > now_us for h in lease.hashes}
        for key, until_us in self.pins.items():
            while until_us > now_us and key in before:
                keys.add(key)
                key = (key[0], before[key].parent)
        return keys

    def _commit(self, write: Write, number: int, places: list[Place]) -> None:
        for segment in self.segments:
            here = [place for place in places if place[2] == segment.number]
            if not here:
                continue
            segment.apply(write.victims.get(segment.number, []))
            slots = [segment.store(write.namespace, h, KNOWN[h], shard) for h, shard, _ in here]
            expected = [CommitStatus.COMMITTED if place in write.pending else CommitStatus.STALE for place in here]
            assert self.directory.commit(number, segment.segment_id, [s.written for s in slots]) == expected
            write.pending -= set(here)
            for slot, status in zip(slots, expected, strict=True):
                if status == CommitStatus.STALE:
                    segment.free(slot.slot, slot.generation)

    def _announce(self, segment: FakeSegment, namespace: Namespace, slots: list[HeldSlot]) -> None:
        before, ordered = inspect(self.directory), self._ordered(segment)
        free_bytes = self.directory.segment(segment.number).free_bytes
        wanted = self.directory.announce(segment.segment_id, namespace.id, [s.announced for s in slots])
        for slot, is_wanted in zip(slots, wanted, strict=True):
            key = (namespace.id, slot.hash)
            self.unannounced[segment.segment_id].discard((slot.slot, slot.generation))
            if (slot.slot, slot.generation) in ordered:
                assert not is_wanted, "a freed block is not resurrected"
            elif key not in before and free_bytes >= slot.size_bytes * len(slots):
                assert is_wanted, "what the pool lost comes back"
            if not is_wanted:
                segment.free(slot.slot, slot.generation)

    def _join(self, segment: FakeSegment) -> None:
        segment.number = self.directory.add_segment(segment.segment_id, segment.node_id, segment.capacity_bytes)
        self.online[segment.number] = segment

    def _lost_by_force(self, keys: set[Key]) -> None:
        """What was in flight there is gone, and leases keep what is still visible."""
        for write in self.open:
            for block_hash in write.in_flight:
                if (write.namespace.id, block_hash) in keys:
                    write.drop(block_hash)
        for lease in self.leases:
            lease.hashes = lease.hashes[: self._count_visible(lease.namespace, lease.hashes)]
        self._forget_pins()

    def _expire(self) -> None:
        for write in self.open:
            if write.deadline_us <= self._now_us():
                write.pending = set()
        self._forget_pins()

    def _forget_pins(self) -> None:
        present = inspect(self.directory)
        self.pins = {key: until_us for key, until_us in self.pins.items() if key in present}

    def _lease(self, namespace: Namespace, hashes: list[bytes], lease_s: float) -> None:
        if lease_s and hashes:
            self.leases.append(Lease(namespace, hashes, self._now_us() + microseconds(lease_s)))

    def _check_matched(self, blocks: int, expected: int, lease_s: float, leased_bytes: int) -> None:
        stats = self.directory.stats()
        if lease_s and stats.used_bytes > self.config.pressure * stats.capacity_bytes:
            assert blocks <= expected
            assert stats.leased_bytes <= max(leased_bytes, self.config.lease_cap * stats.capacity_bytes)
        else:
            assert blocks == expected

    def _ordered(self, segment: FakeSegment) -> set[tuple[int, int]]:
        orders = self.directory.orders(segment.node_id, most=10_000)
        return {(order.slot, order.generation) for order in orders if order.segment_id == segment.segment_id}

    def _live(self, segment: FakeSegment) -> list[HeldSlot]:
        """Slots that the directory must know: held, announced, and not ordered to be freed."""
        if segment.number not in self.online:
            return []
        unknown = self._ordered(segment) | self.unannounced[segment.segment_id]
        return [slot for slot in segment.held.values() if (slot.slot, slot.generation) not in unknown]

    def _visible(self, namespace: Namespace) -> set[bytes]:
        shards = defaultdict(set)
        for segment in self.online.values():
            for slot in self._live(segment):
                if slot.namespace is namespace:
                    shards[slot.hash].add(slot.shard)
        visible = {b""}
        for block_hash, parent in KNOWN.items():
            if len(shards[block_hash]) == namespace.shards and parent in visible:
                visible.add(block_hash)
        return visible - {b""}

    def _some_chain(self, namespace: Namespace, tokens: Tokens, pick: int) -> list[bytes]:
        """Mostly a chain that is there, sometimes just any."""
        visible = sorted(self._visible(namespace))
        wanted = visible[pick % len(visible)] if visible and pick % 4 else CHAINS[tokens][-1]
        return next(hashes for hashes in CHAINS.values() if hashes[-1] == wanted)

    def _count_visible(self, namespace: Namespace, hashes: list[bytes]) -> int:
        """The naive answer to `match`."""
        visible = self._visible(namespace)
        return next((i for i, h in enumerate(hashes) if h not in visible), len(hashes))

    def _now_us(self) -> int:
        return microseconds(self.clock())


class RelaxedDirectoryMachine(DirectoryMachine):
    """The same with the default slack, which keeps chains together at the price of exact order."""

    age_slack = 0.05


def _slot_bytes(namespace: Namespace) -> int:
    return -(-namespace.block_bytes // PAGE_BYTES) * PAGE_BYTES


def _is_committed(block: BlockView) -> bool:
    return block.state > BlockState.IN_FLIGHT


def _is_partial(block: BlockView | None) -> bool:
    return block is not None and block.state == BlockState.DORMANT and block.missing_shards > 0


TestDirectory = DirectoryMachine.TestCase
TestRelaxedDirectory = RelaxedDirectoryMachine.TestCase
