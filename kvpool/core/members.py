"""Which nodes are in the pool: sessions, states, and when a silent node counts as lost.

A node dials in and gets a session; it obeys that session alone, and a newer one of the same node id replaces it. The
service's random incarnation and the session's key stand in every grant, so that nothing durable is needed to tell old
from new.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Self

from kvpool.core.clock import Clock

QUIET = 2 / 3
"""Part of the time after which a silent node is lost: from then on others are better for new blocks. Two heartbeats at
least, since that time is three: one may be late on a busy machine."""


class MemberState(StrEnum):
    """State of a node in the pool."""

    JOINING = "joining"
    """Its inventory is being taken; nothing is placed there yet."""
    READY = "ready"
    DRAINING = "draining"
    """Serves reads, takes no new blocks."""
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class MemberSegment:
    """A segment as its node describes it."""

    segment_id: bytes
    medium: str
    capacity_bytes: int
    off: str = ""
    """Why it is out of use; empty while it is in use."""

    @classmethod
    def of(cls, said: object) -> Self:
        """See `Scrub.of`."""
        return cls(**{field.name: getattr(said, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Scrub:
    """What a node has checked of its blocks since its process started; see common.proto."""

    passes: int = 0
    checked_blocks: int = 0
    checked_bytes: int = 0
    bad_blocks: int = 0
    retired_bytes: int = 0
    progress: float = 0.0

    @classmethod
    def of(cls, said: object) -> Self:
        """The same from a message, whose fields have the same names."""
        return cls(**{field.name: getattr(said, field.name) for field in fields(cls)})


@dataclass(slots=True)
class Member:
    """One node.

    Attributes:
        node_id: Its name.
        incarnation: Random, new at each start of its process.
        session: Random, new each time it dials in.
        key: Seals the grants of this session.
        endpoints: URIs of its data plane, best first.
        segments: Its segments that are in use.
        off: Those that are not.
        seen_s: When it was last heard of.
        since_s: When it joined: the beginning of its session.
        state: See `MemberState`.
        numbers: Directory numbers of its segments, in order.
        scrub: As it said last.
        fetched_bytes: Copied from other nodes, by transport; as it said last.
        version: Of its software, as it said.
        moved_bytes: Moved by its data plane, by direction and transport; as it said last.
        drains: Whether it is to take no new blocks.
        quiet: Whether it has said nothing for so long that nothing is placed on it.
        leaves: Whether it may end.
        mode_told: The mode that its node knows of.
    """

    node_id: str
    incarnation: int
    session: int
    key: bytes
    endpoints: tuple[str, ...]
    segments: tuple[MemberSegment, ...]
    seen_s: float
    since_s: float
    state: MemberState = MemberState.JOINING
    numbers: list[int] = field(default_factory=list)
    scrub: Scrub = field(default_factory=Scrub)
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    version: str = ""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    drains: bool = False
    quiet: bool = False
    leaves: bool = False
    mode_told: tuple[bool, bool] = (False, False)
    off: tuple[MemberSegment, ...] = ()

    @property
    def mode(self) -> tuple[bool, bool]:
        """(drains, leaves): what the pool wants of the node."""
        return self.drains, self.leaves


class Members:
    """The nodes by id. ``version`` moves whenever clients must learn something new.

    Args:
        clock: Monotonic seconds.
        random_bytes: Source of sessions and keys.
        ttl_s: Silence after which a node is lost.
    """

    def __init__(self, clock: Clock, random_bytes: Callable[[int], bytes], ttl_s: float) -> None:
        self._clock = clock
        self._random_bytes = random_bytes
        self._ttl_s = ttl_s
        self._by_id: dict[str, Member] = {}
        # Random, so that a client cannot take a restarted service's topology for the one it knows.
        self.version = int.from_bytes(random_bytes(6), "little") + 1

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_id.values()))

    def get(self, node_id: str) -> Member | None:
        """The node's current membership."""
        return self._by_id.get(node_id)

    def of_session(self, session: int) -> Member | None:
        """The member whose current session this is; None for every older one."""
        return next((m for m in self._by_id.values() if m.session == session and m.state != MemberState.LOST), None)

    def join(
        self, node_id: str, incarnation: int, endpoints: tuple[str, ...], segments: tuple[MemberSegment, ...]
    ) -> Member:
        """A new session for ``node_id``; an older one ends here. The caller drops what the directory had of it."""
        session = int.from_bytes(self._random_bytes(8), "little") >> 1
        in_use = tuple(segment for segment in segments if not segment.off)
        key, now_s = self._random_bytes(32), self._clock()
        member = Member(node_id, incarnation, session, key, endpoints, in_use, seen_s=now_s, since_s=now_s)
        member.off = tuple(segment for segment in segments if segment.off)
        self._by_id[node_id] = member
        self.version += 1
        return member

    def set_state(self, member: Member, state: MemberState) -> None:
        """Move the member to ``state``."""
        if member.state != state:
            member.state = state
            self.version += 1

    def turned_off(self, member: Member, segment: MemberSegment) -> None:
        """One of the member's segments in use, which it has joined with, is out of use now."""
        place = next(i for i, own in enumerate(member.segments) if own.segment_id == segment.segment_id)
        member.segments = member.segments[:place] + member.segments[place + 1 :]
        del member.numbers[place]
        member.off = (*member.off, segment)
        self.version += 1

    def forget(self, member: Member) -> None:
        """The member left for good: it is no longer a node of the pool."""
        if self._by_id.get(member.node_id) is member:
            member.state = MemberState.LOST
            del self._by_id[member.node_id]
            self.version += 1

    def heard(self, member: Member) -> None:
        """The node gave a sign of life."""
        member.seen_s = self._clock()

    def silent(self, part: float = 1.0) -> list[Member]:
        """Members not heard of for longer than the limit, or ``part`` of it, and not yet lost."""
        limit_s = self._clock() - part * self._ttl_s
        return [m for m in self._by_id.values() if m.state != MemberState.LOST and m.seen_s < limit_s]
