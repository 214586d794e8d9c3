"""What a disk below memory is worth in hits: a workload replayed against the directory alone, with and without one.

Nodes write what is reserved, and copy what the directory orders, at once.
"""

import msgspec

from kvpool.bench.measure import rounded
from kvpool.bench.workload import Request, Workload
from kvpool.core.directory import DISK, Directory, FetchBlocks, FreeSlot, ReserveResult
from kvpool.core.keys import split_hashes
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, RESERVE_BLOCKS_MAX, SEGMENT_ID_BYTES
from kvpool.core.namespace import Namespace
from kvpool.testing import ManualClock

CAPACITIES = (0.05, 0.10, 0.25)
"""Memory, as part of the workload's unique blocks."""

DISK_TIMES = 4
"""Size of the disk, in sizes of the memory."""

NODES = 4
REQUEST_S = 0.1
_NAMESPACE = Namespace(model="kvpool-bench-tiers", block_tokens=1, block_bytes=PAGE_BYTES)


class TierRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="disk_hits"):
    """Hit blocks over all blocks of all requests, cold start included.

    Attributes:
        what: The workload.
        capacity: Memory, as part of the unique blocks.
        without_disk: Hit rate of memory alone.
        with_disk: The same with a disk of `DISK_TIMES` the memory.
        from_disk: Part of all blocks that had to be read from disk.
        written: Blocks written to disk for each block that was stored.
    """

    what: str
    capacity: float
    without_disk: float
    with_disk: float
    from_disk: float
    written: float


def measure_tiers(workload: Workload, capacity: float) -> TierRow:
    """Replay ``workload`` twice."""
    memory_blocks = max(1, int(capacity * workload.unique_blocks()) // NODES)
    alone, tiered = _Replay(memory_blocks, 0), _Replay(memory_blocks, DISK_TIMES * memory_blocks)
    for request in workload.requests:
        alone.serve(request)
        tiered.serve(request)
    asked = max(1, sum(len(request.hashes) for request in workload.requests))
    return TierRow(
        what=workload.name,
        capacity=capacity,
        without_disk=rounded(alone.hits / asked),
        with_disk=rounded(tiered.hits / asked),
        from_disk=rounded(tiered.disk_hits / asked),
        written=rounded(tiered.written / max(1, tiered.stored)),
    )


class _Replay:
    """A directory with `NODES` nodes that do at once what they are told."""

    def __init__(self, memory_blocks: int, disk_blocks: int) -> None:
        self.hits = self.disk_hits = self.stored = self.written = 0
        self._generation = 0
        self._clock = ManualClock()
        self._directory = Directory(self._clock)
        self._directory.open_namespace(_NAMESPACE)
        self._ids: dict[int, bytes] = {}
        self._disks: set[int] = set()
        for node in range(NODES):
            self._add(node, memory_blocks, "shm")
            if disk_blocks:
                self._disks.add(self._add(node, disk_blocks, DISK))

    def serve(self, request: Request) -> None:
        """Match, read what is there, and store what is missing."""
        self._clock.advance(REQUEST_S)
        if not request.hashes:
            return
        packed = b"".join(request.hashes)
        matched = self._directory.match(_NAMESPACE.id, packed).blocks
        self.hits += matched
        if matched:
            self._read(packed[: matched * HASH_BYTES])
        for first in range(matched, len(request.hashes), RESERVE_BLOCKS_MAX):
            upto = packed[: (first + RESERVE_BLOCKS_MAX) * HASH_BYTES]
            self._write(self._directory.reserve(_NAMESPACE.id, upto, first), split_hashes(upto[first * HASH_BYTES :]))
        self._copy()

    def _add(self, node: int, blocks: int, medium: str) -> int:
        segment_id = len(self._ids).to_bytes(SEGMENT_ID_BYTES, "little")
        number = self._directory.add_segment(segment_id, f"node-{node}", blocks * PAGE_BYTES, medium)
        self._ids[number] = segment_id
        return number

    def _read(self, packed: bytes) -> None:
        found = self._directory.locate(_NAMESPACE.id, packed)
        in_memory = {b for b, s in zip(found.block, found.segment, strict=True) if s not in self._disks}
        self.disk_hits += found.blocks - len(in_memory)

    def _write(self, reserved: ReserveResult, hashes: list[bytes]) -> None:
        for (number, _), share in reserved.shares.items():
            self.stored += len(share.indexes)
            self._commit(reserved.reservation, number, [hashes[index] for index in share.indexes])

    def _copy(self) -> None:
        while self._directory.move_tiers(30.0):
            for node in range(NODES):
                orders = self._directory.orders(f"node-{node}")
                for order in orders:
                    copy = self._directory.copy(order.copy) if isinstance(order, FetchBlocks) else None
                    if copy is not None:
                        self.written += len(copy.hashes) * copy.destination.is_disk
                        self._commit(copy.number, copy.destination.number, copy.hashes)
                if orders:
                    self._directory.acknowledge(f"node-{node}", orders[-1].number)
        self._acknowledge()

    def _acknowledge(self) -> None:
        for node in range(NODES):
            while orders := self._directory.orders(f"node-{node}"):
                assert all(isinstance(order, FreeSlot | FetchBlocks) for order in orders)
                self._directory.acknowledge(f"node-{node}", orders[-1].number)

    def _commit(self, number: int, segment: int, hashes: list[bytes]) -> None:
        first = self._generation + 1
        self._generation += len(hashes)
        written = [(h, 0, (first + i) & 0x7FFF_FFFF, first + i, 0) for i, h in enumerate(hashes)]
        self._directory.commit(number, self._ids[segment], written)
