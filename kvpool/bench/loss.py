"""What losing one of many nodes costs in hits: a workload replayed against the directory alone, with and without it.

Two runs of the same requests; in one a node is lost half-way and stays away. What is left is what that run hits after
the loss, held against the other. The node lost is the one that holds most; the pool holds the whole workload.
"""

import msgspec

from kvpool.bench.measure import at_least, rounded
from kvpool.bench.replay import Replay
from kvpool.bench.workload import Workload
from kvpool.core.errors import UsageError

NODES = 16
WINDOW = 0.05
"""Part of the requests that is looked at: directly after the loss, and once more after that."""

HEADROOM = 1.25
"""Nodes do not fill evenly."""


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
        replay = _LossReplay(workload, nodes)
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


class _LossReplay(Replay):
    """Nodes of which one can be lost."""

    def __init__(self, workload: Workload, nodes: int) -> None:
        super().__init__()
        for node in range(nodes):
            self.add_segment(node, int(HEADROOM * workload.unique_blocks()) // nodes + 1)

    def lose_fullest(self) -> int:
        """Lose the node that holds most; its blocks."""
        fullest = max(self._directory.segments(), key=lambda segment: segment.blocks)
        lost = self._directory.lose_segment(fullest.segment_id)
        self._directory.drop_lost()
        return lost
