"""Where a new block goes and which blocks make room for it: one decision.

While some segment has room: the parent's, unless it is clearly fuller than the mean, else the emptiest. When none has,
something of the *pool* goes, and the new block takes its place. The tenant gives that is the most above its share
(`Tenants.givers`): a dormant leaf, else a surplus copy, else the oldest evictable leaf. The parent's segment is
preferred when it has a surplus copy too, or when its own oldest leaf is nearly as old. Choosing a node first and a
victim on it second breaks leaf-first order. A tenant whose quota is used up gives of its own, whether the pool is full
or not.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvpool.core.directory.placements import Placements
from kvpool.core.directory.segments import Segment
from kvpool.core.directory.table import NIL
from kvpool.core.directory.tenants import Tenants
from kvpool.core.directory.tombstones import Cause
from kvpool.core.eviction import DORMANT, Candidate, EvictionPolicy

FILL_SLACK = 0.05
"""How much fuller than the mean the parent's segment may be and still be preferred."""

BELOW_MAX = 8
"""Blocks that may leave the disks for one that finds memory held: a few, since it may be held by leases."""

OVER_QUOTA_MAX = 64
"""Blocks that a tenant gives up for one new one: after its quota was lowered, the rest goes in the background."""


class Asked(NamedTuple):
    """Room for one shard of a new block.

    Attributes:
        slot_bytes: How much.
        use: See `EvictionPolicy.admits`.
        owner: The block's tenant.
        now_us: When.
    """

    slot_bytes: int
    use: int
    owner: int
    now_us: int


class Offer(NamedTuple):
    """What a tenant would give: a leaf, a surplus copy of some segment, or one of them first."""

    giver: int
    victim: Candidate | None
    segment: Segment | None
    """Where a surplus copy of its is to go."""


class Placer:
    """Chooses segments, evicting through ``evict`` what must go.

    Args:
        placements: The segments and their accounts.
        tenants: Who holds how much.
        policy: Gives each segment's first victim.
        evict: Removes a victim and gives its bytes back.
        reclaim: Removes a surplus copy and gives its bytes back.
        age_slack: Share of the oldest leaf's age by which the parent's own oldest leaf may be younger and still go.
    """

    def __init__(
        self,
        placements: Placements,
        tenants: Tenants,
        policy: EvictionPolicy,
        evict: Callable[[int, Cause], None],
        reclaim: Callable[[int], None],
        age_slack: float,
    ) -> None:
        self._placements = placements
        self._tenants = tenants
        self._policy = policy
        self._evict = evict
        self._reclaim = reclaim
        self._age_slack = age_slack

    def choose(self, asked: Asked, near: Segment | None) -> Segment | None:
        """A segment with room, ``near`` if it may be, after evicting if it must be.

        None when everything is held, or worth more than the new block (`EvictionPolicy.admits`), or when the tenant's
        quota has no room.
        """
        if not self.fit_quota(asked):
            return None
        tries_below = BELOW_MAX
        while (segment := self._with_room(asked.slot_bytes, near)) is None:
            offer = self._best_offer(asked, near)
            if offer is None:
                if not tries_below or not self._make_room_below(asked):
                    return None
                tries_below -= 1
            elif offer.giver == asked.owner and not self._admits(asked.use, offer):
                return None
            else:
                self._take(offer, Cause.ROOM)
        return segment

    def fit_quota(self, asked: Asked) -> bool:
        """Whether the tenant's quota has room for the block, after giving up blocks of its own if it must be."""
        room_bytes = self._tenants.room_bytes(asked.owner)
        if room_bytes is None or room_bytes >= asked.slot_bytes:
            return True
        if asked.slot_bytes > room_bytes + self._tenants.memory[asked.owner]:
            return False  # not even alone
        for _ in range(OVER_QUOTA_MAX):
            offer = self._own_offer(asked.owner, asked.now_us)
            if offer is None or not self._admits(asked.use, offer):
                return False
            self._take(offer, Cause.QUOTA)
            if (self._tenants.room_bytes(asked.owner) or 0) >= asked.slot_bytes:
                return True
        return False

    def give_back(self, owner: int, now_us: int) -> bool:
        """Give up the first block of a tenant that is above its quota; False when all are held."""
        offer = self._own_offer(owner, now_us)
        if offer is not None:
            self._take(offer, Cause.QUOTA)
        return offer is not None

    def make_room_on(self, segment: Segment, owner: int, now_us: int) -> bool:
        """Give up the first thing that may go on a segment whose free pages are scattered; False when all is held."""
        for giver in self._tenants.givers(self._tenants.memory, owner, 0):
            victim = self._policy.first(segment.number, giver, now_us)
            if victim is not None or segment.last_surplus(giver) != NIL:
                self._take(Offer(giver, victim, segment), Cause.SCATTERED)
                return True
        return False

    def room(self, slot_bytes: int, near: Segment | None, owner: int, most: int) -> tuple[Segment, int] | None:
        """A segment that takes up to ``most`` slots without evicting, and how many; None when there is no room.

        Stops where `choose` would look for another segment, so that a run is placed as its blocks would be one by one.
        """
        room_bytes = self._tenants.room_bytes(owner)
        if room_bytes is not None:
            most = min(most, room_bytes // slot_bytes)
        segment = self._with_room(slot_bytes, near) if most > 0 else None
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

    def _admits(self, use: int, offer: Offer) -> bool:
        """Whether a new block may take the room of another one of its tenant; surplus copies give theirs to any."""
        if offer.victim is None or offer.victim.rank == DORMANT or self._tenants.surplus[offer.giver]:
            return True
        return self._policy.admits(use, offer.victim)

    def _best_offer(self, asked: Asked, near: Segment | None) -> Offer | None:
        """What goes first in the whole pool; None when everything is held."""
        slot_bytes, _, _, now_us = asked
        memory = self._placements.memory
        segments = [
            segment
            for segment in self._placements.segments.values()
            if segment.accepts and segment.totals is memory  # `takes_new`, without a call for each
            if segment.capacity_bytes >= slot_bytes and segment.spared_until_us <= now_us
        ]
        for giver in self._tenants.givers(self._tenants.memory, asked.owner, slot_bytes):
            offer = self._offer(giver, segments, near, now_us)
            if offer is not None:
                return offer
        return None

    def _own_offer(self, owner: int, now_us: int) -> Offer | None:
        """What goes first of a tenant's memory, wherever it is."""
        segments = [s for s in self._placements.segments.values() if not s.is_disk and s.spared_until_us <= now_us]
        return self._offer(owner, segments, None, now_us)

    def _offer(self, giver: int, segments: Sequence[Segment], near: Segment | None, now_us: int) -> Offer | None:
        victim = self._victim(giver, segments, near, now_us)
        surplus = self._with_surplus(giver, segments, near, victim) if self._tenants.surplus[giver] else None
        return Offer(giver, victim, surplus) if victim is not None or surplus is not None else None

    def _make_room_below(self, asked: Asked) -> bool:
        """Give up the oldest leaf on disk: nothing in memory may go, perhaps since it all has children on disk."""
        disks = [
            segment
            for segment in self._placements.segments.values()
            if segment.is_disk and segment.open and segment.spared_until_us <= asked.now_us
        ]
        if not disks:
            return False
        for giver in self._tenants.givers(self._tenants.memory, asked.owner, asked.slot_bytes):
            firsts = (self._policy.first(disk.number, giver, asked.now_us) for disk in disks)
            oldest = min((first for first in firsts if first is not None), default=None)
            if oldest is not None:
                self._evict(oldest.row, Cause.ROOM)
                return True
        return False

    def _take(self, offer: Offer, cause: Cause) -> None:
        """The victim if it is dormant, else the oldest surplus copy there, else the victim after all."""
        victim, segment = offer.victim, offer.segment
        surplus = segment.last_surplus(offer.giver) if segment is not None else NIL
        if surplus != NIL and (victim is None or victim.rank > DORMANT):
            self._reclaim(surplus)
        elif victim is not None:
            self._evict(victim.row, cause)

    def _with_surplus(
        self, giver: int, segments: Sequence[Segment], near: Segment | None, victim: Candidate | None
    ) -> Segment | None:
        """The segment to take a surplus copy from: the parent's, else the one with the most."""
        some = [
            segment
            for segment in segments
            if (surplus := segment.last_surplus(giver)) != NIL
            and (victim is None or self._placements.is_due(surplus, victim.last_use_us))
        ]
        return near if near in some else max(some, key=_surplus, default=None)

    def _victim(self, giver: int, segments: Sequence[Segment], near: Segment | None, now_us: int) -> Candidate | None:
        oldest: Candidate | None = None
        own: Candidate | None = None
        find = self._policy.first
        for segment in segments:
            first = find(segment.number, giver, now_us)
            if first is not None and (oldest is None or first < oldest):
                oldest = first
            if segment is near:
                own = first
        if oldest is None or own is None or own is oldest:
            return oldest
        return own if self._nearly_as_old(own, oldest, now_us) else oldest

    def _nearly_as_old(self, own: Candidate, oldest: Candidate, now_us: int) -> bool:
        age_us = now_us - oldest.last_use_us
        if own.rank != oldest.rank or own.worth > oldest.worth * (1 + self._age_slack):
            return False
        return own.worth > 0 or own.last_use_us - oldest.last_use_us <= self._age_slack * age_us


def _surplus(segment: Segment) -> tuple[int, int]:
    return segment.surplus_bytes, -segment.number


def _emptiness(segment: Segment) -> tuple[float, int]:
    return segment.fill, segment.number
