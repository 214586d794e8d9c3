"""The leaf that is worth least goes first, by what was learned of its kind (`kvpool.core.eviction.worth`).

As long as nothing was learned, and between blocks of one kind, the oldest goes: then it is LRU over leaves. The oldest
leaf of all goes too unless another is worth clearly less; and a new block does not take the place of one that is worth
clearly more: a loop larger than the pool then keeps a part of itself instead of nothing.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvpool.core.directory.table import NIL, BlockState, BlockTable
from kvpool.core.eviction.base import DORMANT, VISIBLE, Candidate
from kvpool.core.eviction.leaf_queues import LeafQueues, Leaves
from kvpool.core.eviction.use import BRANCHED, branched, continued, is_matched, kind_of, tier_of, written
from kvpool.core.eviction.worth import Worth

MARGIN = 1.25
"""So many times less (more) must a block be worth to go before the oldest (to stay before a new one)."""

STALE_AGE = 32
"""Leaves are compared anew when a part of 1 in so many of the oldest one's age has passed."""

PUT_OFF_MAX = 16_384
"""Matches remembered until something is written; what is read only teaches little more."""

_KIND_BITS = 8
"""Queues of visible leaves are numbered by tenant and kind, those of dormant ones by tenant, below 0."""

_Head = tuple[float, int, int, int]
"""(worth, last_use_us, row, queue) of a queue's oldest leaf."""


class LeafWorth:
    """See the module."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._leaves = LeafQueues(blocks, self._queue_of)
        self._worth = Worth()
        self._put_off: deque[tuple[int, bytes, int, int]] = deque(maxlen=PUT_OFF_MAX)
        self._rankings: dict[int, dict[int, _Ranking]] = {}
        """By segment and tenant."""

    def changed(self, row: int) -> None:
        """See `EvictionPolicy.changed`."""
        queue = self._leaves.push(row)
        if queue is not None and queue >= 0:
            self._look_again(self._blocks.home_segment[row], queue)

    def matched(self, row: int, now_us: int) -> None:
        """See `EvictionPolicy.matched`."""
        self._put_off.append((row, self._blocks.hash[row], self._blocks.last_use_us[row], now_us))

    def begins(self, above: int, hashes: Sequence[bytes], now_us: int) -> int:
        """See `EvictionPolicy.begins`."""
        self._work_off()
        blocks, worth = self._blocks, self._worth
        above_use = blocks.use[above] if above >= 0 else 0
        is_branch = above < 0 or blocks.first_child[above] != NIL or tier_of(above_use) >= BRANCHED
        known = worth.deepest(hashes)
        before = worth.again(hashes[known], now_us) if known >= 0 else None
        if before is not None:
            kind, gap_us = before
            tier = min(tier_of(kind) + 1, BRANCHED - 1) if tier_of(kind) < BRANCHED else 0
            if not is_branch:
                tier = max(tier, tier_of(above_use))
            use = written(tier, gap_us, len(hashes) - 1 - known)
        elif is_branch:
            use = written(0, 0, len(hashes))
        elif is_matched(above_use):
            use = kind_of(above_use) & ~3 | kind_of(written(0, 0, len(hashes)))
        else:  # its writer goes on
            use = kind_of(above_use)
        worth.note(hashes[-1], use, now_us, b"" if is_branch else blocks.hash[above])
        return use

    def lost(self, segment: int) -> None:
        """See `EvictionPolicy.lost`."""
        self._leaves.drop(segment)
        self._rankings.pop(segment, None)

    def first(self, segment: int, owner: int, now_us: int) -> Candidate | None:
        """See `EvictionPolicy.first`."""
        leaves = self._leaves.of(segment, now_us)
        for queue in leaves.woken:
            self._look_again(segment, queue)
        leaves.woken.clear()
        row = self._leaves.oldest(leaves, _dormant_queue(owner), now_us)
        if row != NIL:
            return Candidate(DORMANT, 0.0, self._blocks.last_use_us[row], row)
        self._worth.refit(now_us)
        rankings = self._rankings.setdefault(segment, {})
        ranking = rankings.get(owner)
        if ranking is None:
            ranking = rankings[owner] = _Ranking(self._blocks, self._leaves, self._worth, leaves, owner)
        return ranking.first(now_us)

    def admits(self, use: int, victim: Candidate) -> bool:
        """See `EvictionPolicy.admits`."""
        return victim.worth <= MARGIN * self._worth.of(kind_of(use), 0)

    def _queue_of(self, row: int) -> int:
        blocks = self._blocks
        owner = blocks.owners[blocks.namespace[row]]
        if blocks.state[row] != BlockState.VISIBLE:
            return _dormant_queue(owner)
        return owner << _KIND_BITS | kind_of(blocks.use[row])

    def _look_again(self, segment: int, queue: int) -> None:
        """The queue's oldest leaf may be another one than its ranking knows."""
        rankings = self._rankings.get(segment)
        ranking = rankings.get(queue >> _KIND_BITS) if rankings is not None else None
        if ranking is not None:
            ranking.dirty.add(queue)

    def _work_off(self) -> None:
        """Take in the matches since the last write."""
        blocks, worth = self._blocks, self._worth
        while self._put_off:
            row, block_hash, before_us, at_us = self._put_off.popleft()
            if blocks.hash[row] is not block_hash:
                continue  # it is gone
            use, gap_us = blocks.use[row], max(0, at_us - before_us)
            worth.again(block_hash, at_us)
            branches = blocks.first_child[row] != NIL or tier_of(use) >= BRANCHED
            blocks.use[row] = branched(use, gap_us) if branches else continued(use, gap_us)
            worth.note(block_hash, blocks.use[row], at_us)
            self.changed(row)


def _dormant_queue(owner: int) -> int:
    return -1 - owner


class _Ranking:
    """The oldest leaf of each queue of a tenant on a segment, by worth and by last use.

    Attributes:
        dirty: Queues whose oldest leaf may be another one than was known.
    """

    def __init__(self, blocks: BlockTable, queues: LeafQueues, worth: Worth, leaves: Leaves, owner: int) -> None:
        self._blocks = blocks
        self._queues = queues
        self._worth = worth
        self._leaves = leaves
        self._owner = owner
        self._heads: dict[int, _Head] = {}
        self._by_worth: list[_Head] = []
        self._by_age: list[tuple[int, int, _Head]] = []
        self._fits = -1
        self._stale_us = 0
        self.dirty: set[int] = set()

    def first(self, now_us: int) -> Candidate | None:
        """The leaf to evict first."""
        if now_us >= self._stale_us or self._fits != self._worth.fits:
            self._look_at_all(now_us)
        while self.dirty:
            self._look(self.dirty.pop(), now_us)
        while self._by_worth:
            worst, oldest = self._by_worth[0], self._by_age[0][2]
            if not self._is_current(worst, now_us):
                heappop(self._by_worth)
                self._renew(worst, now_us)
            elif not self._is_current(oldest, now_us):
                heappop(self._by_age)
                self._renew(oldest, now_us)
            else:
                worth, last_use_us, row, _ = worst if worst[0] * MARGIN < oldest[0] else oldest
                return Candidate(VISIBLE, worth, last_use_us, row)
        return None

    def _is_current(self, head: _Head, now_us: int) -> bool:
        """Whether the head is still the oldest leaf of its queue."""
        _, last_use_us, row, queue = head
        if self._heads.get(queue) is not head:
            return False
        return self._queues.oldest(self._leaves, queue, now_us) == row and self._blocks.last_use_us[row] == last_use_us

    def _renew(self, head: _Head, now_us: int) -> None:
        """Look for another head in the place of this one, unless that was done."""
        if self._heads.get(head[3]) is head:
            self._look(head[3], now_us)

    def _look_at_all(self, now_us: int) -> None:
        self._heads.clear()
        self._by_worth.clear()
        self._by_age.clear()
        self.dirty.clear()
        for queue in self._leaves.by_use:
            if queue >> _KIND_BITS == self._owner:
                self._look(queue, now_us)
        heapify(self._by_worth)
        self._fits = self._worth.fits
        age_us = now_us - self._by_age[0][0] if self._by_age else 0
        self._stale_us = now_us + age_us // STALE_AGE + 1

    def _look(self, queue: int, now_us: int) -> None:
        row = self._queues.oldest(self._leaves, queue, now_us)
        if row == NIL:
            self._heads.pop(queue, None)
            return
        last_use_us = self._blocks.last_use_us[row]
        head = (self._worth.of(kind_of(queue), now_us - last_use_us), last_use_us, row, queue)
        self._heads[queue] = head
        heappush(self._by_worth, head)
        heappush(self._by_age, (last_use_us, row, head))
