"""Least recently used leaf first: the reference policy.

Heap entries are integers, ``time_us << 32 | row``. They are lazy: using a block only writes its `last_use_us`, and an
entry that turns out to be too early is pushed again with the true time when it reaches the top. So a touch is O(1) and
an eviction O(log n) amortised. A row's entry counts only if it carries the time in `queued_at_us`; others are stale.
"""

from heapq import heappop, heappush

from kvpool.core.directory.table import NEVER_US, NIL, BlockState, BlockTable
from kvpool.core.eviction.base import DORMANT, VISIBLE, Candidate

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class _Queues:
    """One segment's leaves: evictable ones by last use (per rank), held ones by the end of their hold."""

    def __init__(self) -> None:
        self.by_use: tuple[list[int], list[int]] = ([], [])
        self.held: list[int] = []


class LeafLru:
    """LRU over leaves, dormant ones first."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._segments: dict[int, _Queues] = {}

    def changed(self, row: int) -> None:
        """See `EvictionPolicy.changed`."""
        if self._rank(row) is not None:
            self._push_by_use(self._queues(self._blocks.home_segment[row]), row)

    def lost(self, segment: int) -> None:
        """See `EvictionPolicy.lost`."""
        self._segments.pop(segment, None)

    def first(self, segment: int, now_us: int) -> Candidate | None:
        """See `EvictionPolicy.first`."""
        queues = self._queues(segment)
        self._wake_held(queues, segment, now_us)
        for rank in (DORMANT, VISIBLE):
            row = self._oldest(queues, rank, segment, now_us)
            if row != NIL:
                return Candidate(rank, self._blocks.last_use_us[row], row)
        return None

    def _oldest(self, queues: _Queues, rank: int, segment: int, now_us: int) -> int:
        blocks, heap = self._blocks, queues.by_use[rank]
        while heap:
            queued_us, row = heap[0] >> _ROW_BITS, heap[0] & _ROW_MASK
            if blocks.queued_at_us[row] != queued_us or blocks.home_segment[row] != segment or self._rank(row) != rank:
                heappop(heap)
            elif (hold_us := blocks.hold_us(row)) > now_us:
                heappop(heap)
                self._push(queues.held, row, hold_us)
            elif blocks.last_use_us[row] > queued_us:
                heappop(heap)
                self._push_by_use(queues, row)
            else:
                return row
        return NIL

    def _wake_held(self, queues: _Queues, segment: int, now_us: int) -> None:
        blocks, held = self._blocks, queues.held
        while held and held[0] >> _ROW_BITS <= now_us:
            held_us, row = held[0] >> _ROW_BITS, held[0] & _ROW_MASK
            heappop(held)
            is_current = blocks.queued_at_us[row] == held_us and blocks.home_segment[row] == segment
            if is_current and self._rank(row) is not None:
                self._push_by_use(queues, row)

    def _rank(self, row: int) -> int | None:
        """Class of an evictable leaf, holds aside; None for every other row."""
        state = self._blocks.state[row]
        if self._blocks.first_child[row] != NIL or state <= BlockState.IN_FLIGHT:
            return None
        return VISIBLE if state == BlockState.VISIBLE else DORMANT

    def _push_by_use(self, queues: _Queues, row: int) -> None:
        rank = VISIBLE if self._blocks.state[row] == BlockState.VISIBLE else DORMANT
        self._push(queues.by_use[rank], row, self._blocks.last_use_us[row])

    def _push(self, heap: list[int], row: int, time_us: int) -> None:
        self._blocks.queued_at_us[row] = time_us
        heappush(heap, time_us << _ROW_BITS | row)

    def _queues(self, segment: int) -> _Queues:
        queues = self._segments.get(segment)
        if queues is None:
            queues = self._segments[segment] = _Queues()
        return queues


assert NEVER_US < 0, "a freed row's queued time must match no entry"
