"""Which nodes are in the pool, as all of its services know it: one record a node in Redis, and a picture of them here.

A record changes by compare-and-swap, so of two services that a node dials at a time one wins. `version` moves with each
change, and tells clients and services that their picture is old.
"""

import threading
from collections.abc import Callable, Iterator, Mapping

import msgspec

from kvpool.core.clock import Clock
from kvpool.core.errors import UsageError
from kvpool.core.members import Member, MemberSegment, MemberState, Scrub
from kvpool.meta.store.link import RedisLink
from kvpool.meta.store.pool import Epoch

TRIES = 16
"""How often a change is tried again that others were faster with."""


class MemberRecord(msgspec.Struct, array_like=True):
    """A node as it joined, and its state since; see `Member`."""

    node_id: str
    incarnation: int
    session: int
    key: bytes
    endpoints: list[str]
    segments: list[tuple[bytes, str, int, str]]
    numbers: list[int]
    earlier: list[tuple[int, bytes, str, int]]
    """Numbers under which the node's segments still hold blocks of earlier sessions, until it has announced them."""

    state: str = MemberState.JOINING
    drains: bool = False
    server: int = 0
    """Incarnation of the service that holds its stream."""
    version: str = ""
    """Of its software."""
    began_us: int = 0
    """When the session began, by Redis's clock."""

    def in_use(self) -> list[bytes]:
        """Ids of its segments that have numbers, in their order."""
        return [segment_id for segment_id, _, _, off in self.segments if not off]

    def member(self, seen_s: float, since_s: float, said: "Said") -> Member:
        """The same as the rest of a service knows it; times are on the service's clock."""
        segments = tuple(MemberSegment(*segment) for segment in self.segments)
        member = Member(
            self.node_id,
            self.incarnation,
            self.session,
            self.key,
            tuple(self.endpoints),
            tuple(segment for segment in segments if not segment.off),
            seen_s,
            since_s,
        )
        member.off = tuple(segment for segment in segments if segment.off)
        member.state = MemberState(self.state)
        member.numbers = list(self.numbers)
        member.drains = self.drains
        member.version = self.version
        member.scrub, member.fetched_bytes = Scrub(*said.scrub), dict(said.fetched_bytes)
        member.moved_bytes = dict(said.moved_bytes)
        return member


class Said(msgspec.Struct, array_like=True):
    """What a node said last of its work."""

    scrub: tuple[int, int, int, int, int, float] = (0, 0, 0, 0, 0, 0.0)
    fetched_bytes: dict[str, int] = {}
    moved_bytes: dict[str, int] = {}


class SharedMembers:
    """The nodes of one epoch. Thread-safe.

    Args:
        link: The way to Redis.
        epoch: Of its state.
        clock: Monotonic seconds.
        random_bytes: Source of sessions and keys.

    Attributes:
        version: Of the picture.
        numbers: Those of all segments that can be read.
    """

    def __init__(self, link: RedisLink, epoch: Epoch, clock: Clock, random_bytes: Callable[[int], bytes]) -> None:
        self._link = link
        self._pool = epoch.pool
        self._clock = clock
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._records: dict[str, MemberRecord] = {}
        self._members: dict[str, Member] = {}
        self._since: dict[int, float] = {}
        first = int.from_bytes(random_bytes(5), "little") + 1
        self._link.run([("SET", f"{self._pool}version", first, "NX")])
        self.version = 0
        self.numbers: frozenset[int] = frozenset()
        self.refresh()

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, node_id: str) -> Member | None:
        """The node, as of the last `refresh`."""
        return self._members.get(node_id)

    def record(self, node_id: str) -> MemberRecord | None:
        """Its record, as of the last `refresh`."""
        return self._records.get(node_id)

    def since_s(self, session: int) -> float:
        """When a session began, on this service's clock; now, of one that it does not know."""
        return self._since.get(session, self._clock())

    def of_session(self, session: int) -> MemberRecord | None:
        """The node whose current session this is, asking again for one that is not known."""
        return self._find(session) or (self._find(session) if self.refresh() else None)

    def is_current(self, member: Member) -> bool:
        """Whether the session of a stream is the node's current one, as of the last `refresh`."""
        record = self._records.get(member.node_id)
        return record is not None and record.session == member.session and record.state != MemberState.LOST

    def refresh(self) -> bool:
        """Learn what others changed; whether anything was."""
        version = int(self._link.run([("GET", f"{self._pool}version")])[0] or 0)
        with self._lock:
            if version == self.version:
                return False
            return self._read(version)

    def refresh_all(self) -> None:
        """Learn what others changed, and what nodes said since."""
        version = int(self._link.run([("GET", f"{self._pool}version")])[0] or 0)
        with self._lock:
            self._read(version)

    def join(
        self,
        node_id: str,
        incarnation: int,
        endpoints: tuple[str, ...],
        segments: tuple[MemberSegment, ...],
        version: str,
        server: int,
    ) -> tuple[MemberRecord, MemberRecord | None]:
        """A new session, and the record that it takes the place of; raises UsageError for a live node's name."""
        began_us = self._now_us()

        def begin(previous: MemberRecord | None) -> MemberRecord:
            alive = previous is not None and previous.state != MemberState.LOST
            if previous is not None and alive and previous.incarnation != incarnation:
                raise UsageError(f"a live node is called {node_id!r}; give this one another --node-id")
            described = [(s.segment_id, s.medium, s.capacity_bytes, s.off) for s in segments]
            session = int.from_bytes(self._random_bytes(8), "little") >> 1
            key = self._random_bytes(32)
            record = MemberRecord(node_id, incarnation, session, key, list(endpoints), described, [], [], server=server)
            return msgspec.structs.replace(record, version=version, began_us=began_us)

        self._link.call(self._pool, "seen", "seen", node_id)
        before, after = self._change(node_id, begin)
        assert after is not None
        return after, before

    def update(self, node_id: str, session: int, change: Callable[[MemberRecord], None]) -> MemberRecord | None:
        """Change the record of a session that is current; None when it is over."""

        def apply(record: MemberRecord | None) -> MemberRecord | None:
            if record is None or record.session != session or record.state == MemberState.LOST:
                return None
            changed = msgspec.structs.replace(record)
            change(changed)
            return changed

        return self._change(node_id, apply)[1]

    def forget(self, node_id: str) -> None:
        """The node is no longer one of the pool."""
        raw = self._raw(node_id)
        if raw:
            self._link.call(self._pool, "swap", "members", node_id, raw, b"")
        self._link.run([("HDEL", f"{self._pool}seen", node_id)])
        self.refresh()

    def heard(self, member: Member, said: Said) -> bool:
        """The node gave a sign of life; whether its session is current."""
        self._link.call(self._pool, "seen", "seen", member.node_id)
        self._link.run([("HSET", f"{self._pool}said", member.node_id, msgspec.msgpack.encode(said))])
        self.refresh()
        return self.is_current(member)

    def silent(self, ttl_s: float) -> list[MemberRecord]:
        """Live nodes that no service has heard of for so long."""
        named = self._link.call(self._pool, "silent", "seen", int(ttl_s * 1e6))
        found = [self._records.get(node_id.decode()) for node_id in named]
        return [record for record in found if record is not None and record.state != MemberState.LOST]

    def _find(self, session: int) -> MemberRecord | None:
        every = list(self._records.values())
        return next((r for r in every if r.session == session and r.state != MemberState.LOST), None)

    def _change(
        self, node_id: str, change: Callable[[MemberRecord | None], MemberRecord | None]
    ) -> tuple[MemberRecord | None, MemberRecord | None]:
        """(record before, record after); None after when ``change`` did not want to."""
        for _ in range(TRIES):
            raw = self._raw(node_id)
            before = msgspec.msgpack.decode(raw, type=MemberRecord) if raw else None
            after = change(before)
            if after is None:
                return before, None
            if self._link.call(self._pool, "swap", "members", node_id, raw, msgspec.msgpack.encode(after)):
                self.refresh()
                return before, after
        raise UsageError(f"node {node_id!r} joins in too many places at a time; give each its own --node-id")

    def _raw(self, node_id: str) -> bytes:
        (raw,) = self._link.run([("HGET", f"{self._pool}members", node_id)])
        return bytes(raw or b"")

    def _read(self, version: int) -> bool:
        found = self._link.run([("HGETALL", f"{self._pool}members")])[0]
        said = self._link.run([("HGETALL", f"{self._pool}said")])[0]
        records = {n.decode(): msgspec.msgpack.decode(raw, type=MemberRecord) for n, raw in found.items()}
        self._learn_since(records)
        now_s = self._clock()
        self._records = records
        live = [record for record in records.values() if record.state != MemberState.LOST]
        self.numbers = frozenset(n for r in live for n in (*r.numbers, *(earlier[0] for earlier in r.earlier)))
        self._members = {
            node_id: record.member(now_s, self._since[record.session], _said(said.get(node_id.encode())))
            for node_id, record in records.items()
        }
        self.version = version
        return True

    def _learn_since(self, records: Mapping[str, MemberRecord]) -> None:
        """When sessions began: from the first time that each is seen, a step of Redis's clock changes nothing here."""
        known = self._since
        new = [record for record in records.values() if record.session not in known]
        now_us, now_s = (self._now_us() if new else 0), self._clock()
        self._since = {r.session: known[r.session] for r in records.values() if r.session in known}
        for record in new:
            self._since[record.session] = now_s - max(0, now_us - record.began_us) / 1e6

    def _now_us(self) -> int:
        """The time of Redis."""
        return int(self._link.call(self._pool, "now"))


def _said(raw: bytes | None) -> Said:
    return msgspec.msgpack.decode(raw, type=Said) if raw else Said()
