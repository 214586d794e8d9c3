"""Leaves that wait to be evicted: queues by last use, several a segment, and one of those that are held.

Heap entries are integers, ``time_us << 32 | row``. They are lazy: using a block only writes its `last_use_us`, and an
entry that turns out to be too early is pushed again with the true time when it reaches the top. So a touch is O(1) and
an eviction O(log n) amortised. A row's entry counts only if it carries the time in `queued_at_us`; others are stale.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from kvpool.core.directory.table import NEVER_US, NIL, BlockState, BlockTable

_IN_FLIGHT = int(BlockState.IN_FLIGHT)
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class Leaves:
    """One segment's leaves.

    Attributes:
        by_use: The evictable ones by last use, in each queue.
        woken: Queues that leaves went to when their hold ended; who reads it clears it.
    """

    __slots__ = ("by_use", "held", "segment", "woken")

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.by_use: dict[int, list[int]] = {}
        self.held: list[int] = []
        self.woken: list[int] = []


class LeafQueues:
    """The leaves of all segments.

    Args:
        blocks: The rows; `queued_at_us` belongs to this class.
        queue_of: The number of the queue that a committed leaf belongs to; who changes it pushes the leaf again.
    """

    def __init__(self, blocks: BlockTable, queue_of: Callable[[int], int]) -> None:
        self._blocks = blocks
        self._queue_of = queue_of
        self._segments: dict[int, Leaves] = {}

    def push(self, row: int) -> int | None:
        """Queue ``row`` on its home segment if it is a committed leaf; the queue it went to."""
        blocks = self._blocks
        if blocks.first_child[row] != NIL or blocks.state[row] <= BlockState.IN_FLIGHT:
            return None
        queue = self._queue_of(row)
        leaves = self._segment(blocks.home_segment[row])
        heap = leaves.by_use.get(queue)
        if heap is None:
            heap = leaves.by_use[queue] = []
        self._push(heap, row, blocks.last_use_us[row])
        return queue

    def drop(self, segment: int) -> None:
        """Forget the segment's leaves."""
        self._segments.pop(segment, None)

    def of(self, segment: int, now_us: int) -> Leaves:
        """The segment's leaves, those among them whose hold has ended by ``now_us``."""
        leaves = self._segment(segment)
        if leaves.held and leaves.held[0] >> _ROW_BITS <= now_us:
            self._wake_held(leaves, now_us)
        return leaves

    def oldest(self, leaves: Leaves, queue: int, now_us: int) -> int:
        """The row of the queue's least recently used leaf that is not held, or NIL."""
        heap = leaves.by_use.get(queue)
        if not heap:
            return NIL
        blocks, segment = self._blocks, leaves.segment
        while heap:
            queued_us, row = heap[0] >> _ROW_BITS, heap[0] & _ROW_MASK
            is_current = blocks.queued_at_us[row] == queued_us and blocks.home_segment[row] == segment
            is_leaf = blocks.first_child[row] == NIL and blocks.state[row] > _IN_FLIGHT
            if not is_current or not is_leaf or self._queue_of(row) != queue:
                heappop(heap)
            elif (hold_us := blocks.hold_us(row)) > now_us:
                heappop(heap)
                self._push(leaves.held, row, hold_us)
            elif blocks.last_use_us[row] > queued_us:
                heappop(heap)
                self._push(heap, row, blocks.last_use_us[row])
            else:
                return row
        return NIL

    def _wake_held(self, leaves: Leaves, now_us: int) -> None:
        blocks, held = self._blocks, leaves.held
        while held and held[0] >> _ROW_BITS <= now_us:
            held_us, row = held[0] >> _ROW_BITS, held[0] & _ROW_MASK
            heappop(held)
            if blocks.queued_at_us[row] == held_us and blocks.home_segment[row] == leaves.segment:
                queue = self.push(row)
                if queue is not None:
                    leaves.woken.append(queue)

    def _push(self, heap: list[int], row: int, time_us: int) -> None:
        self._blocks.queued_at_us[row] = time_us
        heappush(heap, time_us << _ROW_BITS | row)

    def _segment(self, segment: int) -> Leaves:
        leaves = self._segments.get(segment)
        if leaves is None:
            leaves = self._segments[segment] = Leaves(segment)
        return leaves


assert NEVER_US < 0, "a freed row's queued time must match no entry"
