"""What a disk below memory is worth in hits: a workload replayed against the directory alone, with and without one.

Nodes write what is reserved, and copy what the directory orders, at once.
"""

import msgspec

from kvpool.bench.measure import rounded
from kvpool.bench.replay import NAMESPACE, Replay
from kvpool.bench.workload import Request, Workload
from kvpool.core.directory import DISK, FetchBlocks, FreeSlot

CAPACITIES = (0.05, 0.10, 0.25)
"""Memory, as part of the workload's unique blocks."""

DISK_TIMES = 4
"""Size of the disk, in sizes of the memory."""

NODES = 4


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
    alone, tiered = _TierReplay(memory_blocks, 0), _TierReplay(memory_blocks, DISK_TIMES * memory_blocks)
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


class _TierReplay(Replay):
    """`NODES` nodes that copy at once what they are told to, and count what comes from disk and goes there."""

    def __init__(self, memory_blocks: int, disk_blocks: int) -> None:
        super().__init__()
        self.hits = self.disk_hits = self.written = 0
        self._disks: set[int] = set()
        for node in range(NODES):
            self.add_segment(node, memory_blocks)
            if disk_blocks:
                self._disks.add(self.add_segment(node, disk_blocks, DISK))

    def serve(self, request: Request) -> int:
        """See `Replay.serve`; then blocks go to disk and come back."""
        matched = super().serve(request)
        self.hits += matched
        if request.hashes:
            self._copy()
        return matched

    def _read(self, packed: bytes) -> None:
        found = self._directory.locate(NAMESPACE.id, packed)
        in_memory = {b for b, s in zip(found.block, found.segment, strict=True) if s not in self._disks}
        self.disk_hits += found.blocks - len(in_memory)

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
