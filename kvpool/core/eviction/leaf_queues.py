"""Leaves that wait to be evicted: queues by last use, several a segment, and one of those that are held.

Heap entries are integers, ``time_us << 32 | row``. They are lazy: using a block only writes its `last_use_us`, and an
entry that turns out to be too early is pushed again with the true time when it reaches the top. So a touch is O(1) and
an eviction O(log n) amortised. A row's entry counts only if it carries the time in `queued_at_us`; others are stale.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from kvpool.core.directory.table import NEVER_US, NIL, BlockState, BlockTable

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class _Segment:
    """One segment's leaves: evictable ones by last use in each queue, held ones by the end of their hold."""

    __slots__ = ("by_use", "held")

    def __init__(self) -> None:
        self.by_use: dict[int, list[int]] = {}
        self.held: list[int] = []


class LeafQueues:
    """The leaves of all segments.

    Args:
        blocks: The rows; `queued_at_us` belongs to this class.
        queue_of: The number of the queue that a committed leaf belongs to; who changes it pushes the leaf again.
    """

    def __init__(self, blocks: BlockTable, queue_of: Callable[[int], int]) -> None:
        self._blocks = blocks
        self._queue_of = queue_of
        self._segments: dict[int, _Segment] = {}

    def push(self, row: int) -> int | None:
        """Queue ``row`` on its home segment if it is a committed leaf; the queue it went to."""
        if not self._is_leaf(row):
            return None
        queue = self._queue_of(row)
        self._push_by_use(self._segment(self._blocks.home_segment[row]), queue, row)
        return queue

    def drop(self, segment: int) -> None:
        """Forget the segment's leaves."""
        self._segments.pop(segment, None)

    def queues(self, segment: int) -> Iterable[int]:
        """Numbers of the segment's queues, empty ones included."""
        return self._segment(segment).by_use

    def wake_held(self, segment: int, now_us: int) -> list[int]:
        """Queue the leaves whose hold has ended; the queues they went to."""
        blocks, held = self._blocks, self._segment(segment).held
        woken: list[int] = []
        while held and held[0] >> _ROW_BITS <= now_us:
            held_us, row = held[0] >> _ROW_BITS, held[0] & _ROW_MASK
            heappop(held)
            if blocks.queued_at_us[row] == held_us and blocks.home_segment[row] == segment:
                queue = self.push(row)
                if queue is not None:
                    woken.append(queue)
        return woken

    def oldest(self, segment: int, queue: int, now_us: int) -> int:
        """The row of the queue's least recently used leaf that is not held, or NIL."""
        blocks, leaves = self._blocks, self._segment(segment)
        heap = leaves.by_use.get(queue)
        while heap:
            queued_us, row = heap[0] >> _ROW_BITS, heap[0] & _ROW_MASK
            is_current = blocks.queued_at_us[row] == queued_us and blocks.home_segment[row] == segment
            if not is_current or not self._is_leaf(row) or self._queue_of(row) != queue:
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

    def _is_leaf(self, row: int) -> bool:
        return self._blocks.first_child[row] == NIL and self._blocks.state[row] > BlockState.IN_FLIGHT

    def _push_by_use(self, leaves: _Segment, queue: int, row: int) -> None:
        heap = leaves.by_use.get(queue)
        if heap is None:
            heap = leaves.by_use[queue] = []
        self._push(heap, row, self._blocks.last_use_us[row])

    def _push(self, heap: list[int], row: int, time_us: int) -> None:
        self._blocks.queued_at_us[row] = time_us
        heappush(heap, time_us << _ROW_BITS | row)

    def _segment(self, segment: int) -> _Segment:
        leaves = self._segments.get(segment)
        if leaves is None:
            leaves = self._segments[segment] = _Segment()
        return leaves


assert NEVER_US < 0, "a freed row's queued time must match no entry"
