"""Store nodes without bytes: slots with headers, freed only by order. What tests hold a directory to account with."""

from dataclasses import dataclass, field

from kvpool.core.directory import (
    AnnouncedBlock,
    CommitStatus,
    Copy,
    Directory,
    DirectoryConfig,
    FetchBlocks,
    FreeSlot,
    Inventory,
    Order,
    ReserveResult,
)
from kvpool.core.keys import NO_PARENT, chain_hashes
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.namespace import Namespace
from kvpool.testing import ManualClock


@dataclass(frozen=True, slots=True, repr=False)
class HeldSlot:
    """A slot's header, as its node keeps it."""

    namespace: Namespace
    hash: bytes
    parent: bytes
    shard: int
    slot: int
    generation: int

    def __repr__(self) -> str:
        return f"<{self.hash.hex()[:8]}/{self.shard} in slot {self.slot}, generation {self.generation}>"

    @property
    def checksum(self) -> int:
        """Any value that differs from slot to slot does."""
        return self.generation << 8 | self.slot

    @property
    def size_bytes(self) -> int:
        return -(-self.namespace.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def written(self) -> tuple[bytes, int, int, int, int]:
        """What a node commits of it."""
        return (self.hash, self.shard, self.slot, self.generation, self.checksum)

    @property
    def announced(self) -> AnnouncedBlock:
        """What a node that joins says of it."""
        return AnnouncedBlock(self.hash, self.parent, self.shard, self.slot, self.generation, self.checksum, 1.0)


@dataclass(slots=True)
class FakeSegment:
    """A segment's committed slots. Numbers are reused as soon as they are free, generations never."""

    segment_id: bytes
    node_id: str
    capacity_bytes: int
    medium: str = "shm"
    number: int = -1
    last_generation: int = 0
    held: dict[int, HeldSlot] = field(default_factory=dict)

    def store(self, namespace: Namespace, block_hash: bytes, parent: bytes, shard: int) -> HeldSlot:
        """Write one shard of a block into the lowest free slot."""
        slot = next(i for i in range(len(self.held) + 1) if i not in self.held)
        self.last_generation += 1
        self.held[slot] = HeldSlot(namespace, block_hash, parent, shard, slot, self.last_generation)
        return self.held[slot]

    def free(self, slot: int, generation: int) -> bool:
        """Free the slot if it still holds ``generation``."""
        holds = slot in self.held and self.held[slot].generation == generation
        if holds:
            del self.held[slot]
        return holds

    def apply(self, orders: list[Order]) -> None:
        """Free what the directory ordered."""
        for order in orders:
            if isinstance(order, FreeSlot) and order.segment_id == self.segment_id:
                self.free(order.slot, order.generation)


def chain(*tokens: int) -> list[bytes]:
    """Hashes of a chain of one-token blocks; chains share the blocks of their common prefix."""
    return chain_hashes(tokens, 1)


def make_namespace(pages: int = 1, shards: int = 1, model: str = "demo") -> Namespace:
    """A namespace whose slots take ``pages`` pages each."""
    return Namespace(model=model, block_tokens=1, block_bytes=pages * PAGE_BYTES, shards=shards)


SHARDED = make_namespace(shards=2)
"""Its blocks are visible when two ranks have written them."""


class SmallPool:
    """A directory over fake segments of a few pages, one a node, and the writes that a client would do."""

    def __init__(self, *pages: int, namespaces: tuple[Namespace, ...] = (), config: DirectoryConfig | None = None):
        self.clock = ManualClock()
        self.directory = self.open_directory(config)
        self.namespaces = namespaces or (make_namespace(),)
        for namespace in self.namespaces:
            self.directory.open_namespace(namespace)
        self.segments = [FakeSegment(bytes([i]) * 16, f"node-{i}", n * PAGE_BYTES) for i, n in enumerate(pages)]
        for segment in self.segments:
            self.join(segment)

    def open_directory(self, config: DirectoryConfig | None) -> Directory:
        return Directory(self.clock, config)

    @property
    def namespace(self) -> Namespace:
        """The first one."""
        return self.namespaces[0]

    def join(self, segment: FakeSegment) -> None:
        """The segment's node joins; it announces nothing yet."""
        where = (segment.segment_id, segment.node_id, segment.capacity_bytes, segment.medium)
        segment.number = self.directory.add_segment(*where)

    def announce(self, segment: FakeSegment, slots: list[HeldSlot]) -> list[bool]:
        """The node announces ``slots``, all of one namespace, and frees what the directory does not want."""
        part = Inventory.of([slot.announced for slot in slots])
        wanted = self.directory.announce(segment.segment_id, slots[0].namespace.id, part).tolist()
        for slot, is_wanted in zip(slots, wanted, strict=True):
            if not is_wanted:
                segment.free(slot.slot, slot.generation)
        return wanted

    def reserve(self, hashes: list[bytes], namespace: Namespace | None = None, **options) -> ReserveResult:
        """Reserve, as a client would."""
        return self.directory.reserve((namespace or self.namespace).id, b"".join(hashes), **options)

    def commit(
        self, result: ReserveResult, hashes: list[bytes], namespace: Namespace | None = None, first: int = 0
    ) -> list[CommitStatus]:
        """Write every share of ``result``; ``hashes`` is the chain from its root that was reserved from ``first``."""
        statuses = []
        for number, shard in result.shares:
            statuses += self.commit_share(result, number, shard, hashes, namespace, first)
        return statuses

    def commit_share(
        self,
        result: ReserveResult,
        number: int,
        shard: int,
        hashes: list[bytes],
        namespace: Namespace | None = None,
        first: int = 0,
    ) -> list[CommitStatus]:
        """Write one rank's share of ``result``, as the segment's node would."""
        segment = next(segment for segment in self.segments if segment.number == number)
        share = result.shares[number, shard]
        segment.apply(share.victims)
        slots = []
        for i in (first + index for index in share.indexes):
            parent = hashes[i - 1] if i else NO_PARENT
            slots.append(segment.store(namespace or self.namespace, hashes[i], parent, shard))
        statuses = self.directory.commit(result.reservation, segment.segment_id, [s.written for s in slots])
        for slot, status in zip(slots, statuses, strict=True):
            if status == CommitStatus.STALE:
                segment.free(slot.slot, slot.generation)
        return statuses

    def store(self, hashes: list[bytes], namespace: Namespace | None = None, first: int = 0) -> ReserveResult:
        """Reserve and commit a chain."""
        result = self.reserve(hashes, namespace, first=first)
        self.commit(result, hashes, namespace, first)
        return result

    def visible(self, hashes: list[bytes], namespace: Namespace | None = None) -> list[bool]:
        """Which of the blocks can be matched; does not touch them."""
        return [self.directory.explain((namespace or self.namespace).id, h) is None for h in hashes]

    def slot_of(self, block_hash: bytes, shard: int = 0) -> tuple[FakeSegment, HeldSlot]:
        """The slot that holds a block."""
        return next(
            (segment, slot)
            for segment in self.segments
            for slot in segment.held.values()
            if slot.hash == block_hash and slot.shard == shard
        )

    def lose_block(self, block_hash: bytes, shard: int = 0) -> None:
        """The block's node finds its slot gone and says so."""
        segment, slot = self.slot_of(block_hash, shard)
        segment.free(slot.slot, slot.generation)
        assert self.directory.gone(segment.segment_id, slot.namespace.id, block_hash, slot.slot, slot.generation)

    def lose(self, segment_id: bytes) -> int:
        """The segment's node is gone, and all that the directory had of it; how many placements that was."""
        lost = self.directory.lose_segment(segment_id)
        assert self.directory.drop_lost() == 0
        return lost

    def copies(self) -> list[Copy]:
        """The open copies that nodes were ordered to fetch."""
        orders = [order for s in self.segments for order in self.directory.orders(s.node_id)]
        numbers = [order.copy for order in orders if isinstance(order, FetchBlocks)]
        return [copy for number in numbers if (copy := self.directory.copy(number)) is not None]

    def fetch(self, copy: Copy) -> list[CommitStatus]:
        """The destination's node fetches what is left of a copy."""
        segment = next(segment for segment in self.segments if segment.number == copy.destination.number)
        segment.apply(self.directory.orders(segment.node_id))
        namespace = self.namespaces[copy.namespace]
        named = [(h, p) for h, p in zip(copy.hashes, copy.parents, strict=True) if h in copy.rows]
        slots = [segment.store(namespace, h, p, copy.shard) for h, p in named]
        statuses = self.directory.commit(copy.number, segment.segment_id, [slot.written for slot in slots])
        for slot, status in zip(slots, statuses, strict=True):
            if status == CommitStatus.STALE:
                segment.free(slot.slot, slot.generation)
        return statuses

    def obey(self) -> None:
        """All nodes apply and acknowledge all their orders."""
        for segment in self.segments:
            orders = self.directory.orders(segment.node_id)
            segment.apply(orders)
            if orders:
                self.directory.acknowledge(segment.node_id, orders[-1].number)

    def in_use(self) -> tuple[int, int]:
        """(open reservations, bytes used): what must be as before when a call changes nothing."""
        stats = self.directory.stats()
        return stats.reservations, stats.used_bytes
