"""What losing one of many nodes costs in hits: a workload replayed against the directory alone, with and without it.

Two runs of the same requests; in one a node is lost half-way and stays away. What is left is what that run hits after
the loss, held against the other. The node lost is the one that holds most; the pool holds the whole workload.
"""

import msgspec

from kvpool.bench.measure import at_least, rounded
from kvpool.bench.workload import Request, Workload
from kvpool.core.directory import Directory, ReserveResult
from kvpool.core.errors import UsageError
from kvpool.core.keys import split_hashes
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, RESERVE_BLOCKS_MAX, SEGMENT_ID_BYTES
from kvpool.core.namespace import Namespace
from kvpool.testing import ManualClock

NODES = 16
WINDOW = 0.05
"""Part of the requests that is looked at: directly after the loss, and once more after that."""

HEADROOM = 1.25
"""Nodes do not fill evenly."""

REQUEST_S = 0.1
_NAMESPACE = Namespace(model="kvpool-bench-loss", block_tokens=1, block_bytes=PAGE_BYTES)


class LossRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="recovery_hits"):
    """Hits after one of ``nodes`` nodes was lost, part of what they are without the loss.

    Attributes:
        what: The workload.
        nodes: Nodes before the loss.
        lost_blocks: Blocks that the lost node held.
        requests: Requests of each of the two windows.
        hit_rate: Without the loss, in the first window.
        at_once: Part of it that is left in the first window.
        later: The same in the window after that.
    """

    what: str
    nodes: int
    lost_blocks: int
    requests: int
    hit_rate: float
    at_once: float
    later: float


def measure_loss(workload: Workload, nodes: int = NODES) -> LossRow:
    """Replay ``workload`` twice; raises UsageError for one that is too short to be cut in two."""
    at_least("nodes", nodes, 2)
    requests = workload.requests
    window, middle = max(1, int(WINDOW * len(requests))), len(requests) // 2
    if middle + 2 * window > len(requests) or not middle:
        raise UsageError(f"{workload.name} has {len(requests)} requests, too few to lose a node half-way; give more")
    hits: list[tuple[int, int]] = []
    lost_blocks = 0
    for loses in (False, True):
        replay = _Replay(workload, nodes)
        for request in requests[:middle]:
            replay.serve(request)
        if loses:
            lost_blocks = replay.lose_fullest()
        first = sum(replay.serve(request) for request in requests[middle : middle + window])
        second = sum(replay.serve(request) for request in requests[middle + window : middle + 2 * window])
        hits.append((first, second))
    asked = sum(len(request.hashes) for request in requests[middle : middle + window])
    return LossRow(
        what=workload.name,
        nodes=nodes,
        lost_blocks=lost_blocks,
        requests=window,
        hit_rate=rounded(hits[0][0] / max(1, asked)),
        at_once=rounded(hits[1][0] / max(1, hits[0][0])),
        later=rounded(hits[1][1] / max(1, hits[0][1])),
    )


class _Replay:
    """A directory with nodes that write whatever is reserved at once."""

    def __init__(self, workload: Workload, nodes: int) -> None:
        self._clock = ManualClock()
        self._directory = Directory(self._clock)
        self._directory.open_namespace(_NAMESPACE)
        self._generation = 0
        self._ids: dict[int, bytes] = {}
        node_bytes = (int(HEADROOM * workload.unique_blocks()) // nodes + 1) * PAGE_BYTES
        for node in range(nodes):
            segment_id = node.to_bytes(SEGMENT_ID_BYTES, "little")
            self._ids[self._directory.add_segment(segment_id, f"node-{node}", node_bytes)] = segment_id

    def serve(self, request: Request) -> int:
        """Match, and store what is missing; the hits."""
        self._clock.advance(REQUEST_S)
        if not request.hashes:
            return 0
        packed = b"".join(request.hashes)
        matched = self._directory.match(_NAMESPACE.id, packed).blocks
        for first in range(matched, len(request.hashes), RESERVE_BLOCKS_MAX):
            upto = packed[: (first + RESERVE_BLOCKS_MAX) * HASH_BYTES]
            self._write(self._directory.reserve(_NAMESPACE.id, upto, first), split_hashes(upto[first * HASH_BYTES :]))
        return matched

    def lose_fullest(self) -> int:
        """Lose the node that holds most; its blocks."""
        fullest = max(self._directory.segments(), key=lambda segment: segment.blocks)
        lost = self._directory.lose_segment(fullest.segment_id)
        self._directory.drop_lost()
        return lost

    def _write(self, reserved: ReserveResult, hashes: list[bytes]) -> None:
        for (number, shard), share in reserved.shares.items():
            written = []
            for index in share.indexes:
                self._generation += 1
                written.append((hashes[index], shard, self._generation & 0x7FFF_FFFF, self._generation, 0))
            self._directory.commit(reserved.reservation, self._ids[number], written)
