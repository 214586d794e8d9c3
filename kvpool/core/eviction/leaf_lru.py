"""Least recently used leaf first: the reference policy."""

from collections.abc import Sequence

from kvpool.core.directory.table import NIL, BlockState, BlockTable
from kvpool.core.eviction.base import DORMANT, VISIBLE, Candidate
from kvpool.core.eviction.leaf_queues import LeafQueues

_STATE_VISIBLE = int(BlockState.VISIBLE)
"""Looked at for every leaf that waits first in a queue: an enum's member takes as long as all the rest."""

assert (DORMANT, VISIBLE) == (False, True)


class LeafLru:
    """LRU over leaves, dormant ones first."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._leaves = LeafQueues(blocks, self._queue_of)

    def changed(self, row: int) -> None:
        """See `EvictionPolicy.changed`."""
        self._leaves.push(row)

    def matched(self, row: int, now_us: int) -> None:
        """See `EvictionPolicy.matched`."""

    def begins(self, above: int, hashes: Sequence[bytes], now_us: int) -> int:  # noqa: ARG002
        """See `EvictionPolicy.begins`."""
        return 0

    def lost(self, segment: int) -> None:
        """See `EvictionPolicy.lost`."""
        self._leaves.drop(segment)

    def first(self, segment: int, owner: int, now_us: int) -> Candidate | None:
        """See `EvictionPolicy.first`."""
        leaves = self._leaves.of(segment, now_us)
        leaves.woken.clear()
        for rank in (DORMANT, VISIBLE):
            queue = owner << 1 | rank
            if leaves.by_use.get(queue) and (row := self._leaves.oldest(leaves, queue, now_us)) != NIL:
                return Candidate(rank, 0.0, self._blocks.last_use_us[row], row)
        return None

    def admits(self, use: int, victim: Candidate) -> bool:  # noqa: ARG002
        """See `EvictionPolicy.admits`: whatever is new is worth more than the oldest."""
        return True

    def _queue_of(self, row: int) -> int:
        """Each tenant has a queue of dormant leaves and one of visible ones."""
        blocks = self._blocks
        return blocks.owners[blocks.namespace[row]] << 1 | (blocks.state[row] == _STATE_VISIBLE)
