"""Where a new block goes and which blocks make room for it: one decision.

While some segment has room: the parent's, unless it is clearly fuller than the mean, else the emptiest. When none has,
something of the *pool* goes, and the new block takes its place: a dormant leaf, else a surplus copy, else the oldest
evictable leaf. The parent's segment is preferred when it has a surplus copy too, or when its own oldest leaf is nearly
as old. Choosing a node first and a victim on it second breaks leaf-first order.
"""

from collections.abc import Callable

from kvpool.core.directory.segments import Placements, Segment
from kvpool.core.directory.table import NIL
from kvpool.core.directory.tombstones import Cause
from kvpool.core.eviction import DORMANT, Candidate, EvictionPolicy

FILL_SLACK = 0.05
"""How much fuller than the mean the parent's segment may be and still be preferred."""

BELOW_MAX = 8
"""Blocks that may leave the disks for one that finds memory held: a few, since it may be held by leases."""


class Placer:
    """Chooses segments, evicting through ``evict`` what must go.

    Args:
        placements: The segments and their accounts.
        policy: Gives each segment's first victim.
        evict: Removes a victim and gives its bytes back.
        reclaim: Removes a surplus copy and gives its bytes back.
        age_slack: Share of the oldest leaf's age by which the parent's own oldest leaf may be younger and still go.
    """

    def __init__(
        self,
        placements: Placements,
        policy: EvictionPolicy,
        evict: Callable[[int, Cause], None],
        reclaim: Callable[[int], None],
        age_slack: float,
    ) -> None:
        self._placements = placements
        self._policy = policy
        self._evict = evict
        self._reclaim = reclaim
        self._age_slack = age_slack

    def choose(self, slot_bytes: int, near: Segment | None, now_us: int, use: int) -> Segment | None:
        """A segment with room for ``slot_bytes``, after evicting if it must be.

        None when everything is held, or worth more than a new block with ``use`` (`EvictionPolicy.admits`).
        """
        tries_below = BELOW_MAX
        while True:
            segment = self._with_room(slot_bytes, near)
            if segment is not None:
                return segment
            victim = self._victim(slot_bytes, near, now_us)
            if victim is not None and victim.rank > DORMANT and not self._admits(use, victim):
                return None
            if self._make_room(slot_bytes, near, victim, now_us):
                continue
            if not tries_below or not self._make_room_below(now_us):
                return None
            tries_below -= 1

    def make_room_on(self, segment: Segment, now_us: int) -> bool:
        """Give up the first thing that may go on a segment whose free pages are scattered; False when all is held."""
        return self._give_up(self._policy.first(segment.number, now_us), segment, Cause.SCATTERED)

    def room(self, slot_bytes: int, near: Segment | None, most: int) -> tuple[Segment, int] | None:
        """A segment that takes up to ``most`` slots without evicting, and how many; None when there is no room.

        Stops where `choose` would look for another segment, so that a run is placed as its blocks would be one by one.
        """
        segment = self._with_room(slot_bytes, near)
        if segment is None:
            return None
        placements = self._placements
        memory = placements.memory
        level = (memory.used_bytes / memory.capacity_bytes + FILL_SLACK) * segment.capacity_bytes
        before_level = int(level - segment.used_bytes) // slot_bytes
        return segment, max(1, min(most, segment.free_bytes // slot_bytes, before_level))

    def _with_room(self, slot_bytes: int, near: Segment | None) -> Segment | None:
        placements, memory = self._placements, self._placements.memory
        if memory.capacity_bytes - memory.used_bytes < slot_bytes:
            return None
        if near is not None and near.takes_new and near.capacity_bytes - near.used_bytes >= slot_bytes:
            mean = memory.used_bytes / memory.capacity_bytes
            if near.used_bytes <= (mean + FILL_SLACK) * near.capacity_bytes:
                return near
        roomy = [s for s in placements.segments.values() if s.takes_new and s.free_bytes >= slot_bytes]
        return min(roomy, key=_emptiness, default=None)

    def _admits(self, use: int, victim: Candidate) -> bool:
        """Whether a new block may take the room; surplus copies give theirs to any."""
        return self._placements.memory.surplus_bytes > 0 or self._policy.admits(use, victim)

    def _make_room(self, slot_bytes: int, near: Segment | None, victim: Candidate | None, now_us: int) -> bool:
        """Give up the first thing that may go in the whole pool; False when everything is held."""
        if victim is not None and not self._placements.memory.surplus_bytes:  # nearly always
            self._evict(victim.row, Cause.ROOM)
            return True
        return self._give_up(victim, self._with_surplus(slot_bytes, near, victim, now_us), Cause.ROOM)

    def _make_room_below(self, now_us: int) -> bool:
        """Give up the oldest leaf on disk: nothing in memory may go, perhaps since it all has children on disk."""
        disks = (s for s in self._placements.segments.values() if s.is_disk and s.open and s.spared_until_us <= now_us)
        oldest = min((first for s in disks if (first := self._policy.first(s.number, now_us))), default=None)
        if oldest is not None:
            self._evict(oldest.row, Cause.ROOM)
        return oldest is not None

    def _give_up(self, victim: Candidate | None, segment: Segment | None, cause: Cause) -> bool:
        """The victim if it is dormant, else the oldest surplus copy of ``segment``, else the victim after all."""
        has_surplus = segment is not None and segment.last_surplus != NIL
        if segment is not None and has_surplus and (victim is None or victim.rank > DORMANT):
            self._reclaim(segment.last_surplus)
        elif victim is not None:
            self._evict(victim.row, cause)
        else:
            return False
        return True

    def _with_surplus(
        self, slot_bytes: int, near: Segment | None, victim: Candidate | None, now_us: int
    ) -> Segment | None:
        """The segment to take a surplus copy from: the parent's, else the one with the most."""
        some = [
            s
            for s in self._placements.segments.values()
            if s.last_surplus != NIL and s.takes_new and s.capacity_bytes >= slot_bytes and s.spared_until_us <= now_us
            if victim is None or self._placements.is_due(s.last_surplus, victim.last_use_us)
        ]
        return near if near in some else max(some, key=_surplus, default=None)

    def _victim(self, slot_bytes: int, near: Segment | None, now_us: int) -> Candidate | None:
        firsts = {
            number: first
            for number, segment in self._placements.segments.items()
            if segment.takes_new and segment.capacity_bytes >= slot_bytes and segment.spared_until_us <= now_us
            if (first := self._policy.first(number, now_us)) is not None
        }
        if not firsts:
            return None
        oldest = min(firsts.values())
        own = firsts.get(near.number) if near is not None else None
        return own if own is not None and self._nearly_as_old(own, oldest, now_us) else oldest

    def _nearly_as_old(self, own: Candidate, oldest: Candidate, now_us: int) -> bool:
        age_us = now_us - oldest.last_use_us
        if own.rank != oldest.rank or own.worth > oldest.worth * (1 + self._age_slack):
            return False
        return own.worth > 0 or own.last_use_us - oldest.last_use_us <= self._age_slack * age_us


def _surplus(segment: Segment) -> tuple[int, int]:
    return segment.surplus_bytes, -segment.number


def _emptiness(segment: Segment) -> tuple[float, int]:
    return segment.fill, segment.number
