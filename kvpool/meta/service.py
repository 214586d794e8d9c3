"""The metadata service without its wires: one lock round the directory and the members.

Every front door (gRPC servicers, framed sessions) calls these methods; nothing else touches the state.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.core.clock import Clock
from kvpool.core.directory import (
    AnnouncedBlock,
    CommitStatus,
    Directory,
    DirectoryConfig,
    DirectoryStats,
    Location,
    Match,
    MissReason,
    Order,
    ReserveResult,
)
from kvpool.core.errors import CapacityError, InvalidHashError, UnavailableError, UsageError
from kvpool.core.keys import hash_at
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, HASH_BYTES, NAMESPACE_ID_BYTES, RESERVATION_S_MAX
from kvpool.core.members import Member, Members, MemberSegment, MemberState
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.meta.moving import Mover
from kvpool.meta.sealing import Slice, fetch_message
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import MetaSettings
from kvpool.transport.wire.messages import NodeInfo, SegmentGrant, SegmentInfo, Topology
from kvpool.v1 import membership_pb2

ORDERS_PER_MESSAGE = 1024
GRANTS_BYTES_MAX = FRAME_BODY_BYTES_MAX * 3 // 4
"""Grants of one reservation, so that they fit the frame of its answer with the topology."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation, with a sealed grant for each segment."""

    result: ReserveResult
    grants: list[SegmentGrant]


@dataclass(frozen=True, slots=True)
class MetaStatus:
    """What operators see."""

    incarnation: int
    topology: Topology
    namespaces: list[Namespace]
    stats: DirectoryStats
    used: dict[int, tuple[int, int]]
    """(used bytes, placements) by segment number."""


class MetaService:
    """Directory and members behind one lock. Thread-safe.

    Args:
        settings: Limits and times.
        clock: Monotonic seconds.
        random_bytes: Source of incarnation, sessions and keys.
    """

    def __init__(self, settings: MetaSettings, clock: Clock, random_bytes: Callable[[int], bytes]) -> None:
        self.settings = settings
        self.incarnation = int.from_bytes(random_bytes(8), "little") >> 1
        config = DirectoryConfig(
            policy=settings.policy,
            lease_cap=settings.lease_cap,
            tombstones=settings.tombstones,
            replicas_max=settings.replicas_max,
            replica_read_rate=settings.replica_read_rate,
            replica_budget=settings.replica_budget,
        )
        self._directory = Directory(clock, config)
        self._members = Members(clock, random_bytes, settings.node_ttl_s)
        self._lock = threading.Lock()
        self._orders_changed = threading.Condition(self._lock)
        self._topology: Topology | None = None
        self.mover = Mover(self._directory, self._members, self._orders_changed, settings, clock)

    # Clients

    def open_namespace(self, document: bytes) -> bytes:
        """Make a namespace known; returns its id. Raises InvalidNamespaceError, CapacityError."""
        namespace = parse_namespace(document)
        with self._lock:
            self._directory.open_namespace(namespace)
        return namespace.id

    def namespace(self, namespace_id: bytes) -> Namespace:
        """The open namespace; raises UnknownNamespaceError."""
        with self._lock:
            return self._directory.namespace(_checked_id(namespace_id))

    def match(self, namespace_id: bytes, hashes: bytes, first: int, lease_s: float) -> Match:
        """See `Directory.match`."""
        with self._lock:
            return self._directory.match(_checked_id(namespace_id), hashes, first, self._lease_s(lease_s))

    def release(self, lease: int) -> bool:
        """See `Directory.release`."""
        with self._lock:
            return self._directory.release(lease)

    def locate(self, namespace_id: bytes, hashes: bytes, first: int, shard: int | None) -> Location:
        """See `Directory.locate`."""
        with self._lock:
            return self._directory.locate(_checked_id(namespace_id), hashes, first, shard)

    def reserve(
        self, namespace_id: bytes, hashes: bytes, first: int, parent: bytes, owner: str, ttl_s: float
    ) -> Reserved:
        """See `Directory.reserve`; ``ttl_s`` of 0 asks for the default. CapacityError: the grants fit no answer."""
        namespace_id = _checked_id(namespace_id)
        if len(parent) not in (0, HASH_BYTES):
            raise InvalidHashError(f"parent is {len(parent)} bytes; a block hash is {HASH_BYTES}")
        ttl_s = min(ttl_s or self.settings.reservation_ttl_s, RESERVATION_S_MAX)
        with self._lock:
            result = self._directory.reserve(namespace_id, hashes, first, parent, owner=owner, ttl_s=ttl_s)
            above = parent if not first else hash_at(hashes, first - 1)
            chain = (above or bytes(HASH_BYTES)) + hashes[first * HASH_BYTES :]
            block_bytes = self._directory.namespace(namespace_id).block_bytes
            slice_of = Slice(self.incarnation, result.reservation, namespace_id, block_bytes, ttl_s, chain)
            grants = [
                grant
                for (number, shard), share in result.shares.items()
                for grant in slice_of.seal(self._directory.segment(number), self._member_of(number), shard, share)
            ]
            size_bytes = sum(len(grant.grant) + len(grant.blocks) for grant in grants)
            if size_bytes > GRANTS_BYTES_MAX:
                self._directory.abort(result.reservation)
                raise CapacityError(f"grants of {size_bytes} bytes in one reservation; reserve fewer blocks at a time")
        return Reserved(result, grants)

    def abort(self, reservation: int, hashes: list[bytes] | None, *, crowded: bool = False) -> int:
        """See `Directory.abort`."""
        with self._lock:
            blocks = self._directory.abort(reservation, hashes, crowded=crowded)
        self.mover.settled()
        return blocks

    def report_bad(self, namespace_id: bytes, block_hash: bytes, segment: int, slot: int, generation: int) -> bool:
        """See `Directory.report_bad`; False for a segment that is not open any more."""
        with self._lock:
            segment_id = next((s.segment_id for s in self._directory.segments() if s.number == segment), None)
            if segment_id is None:
                return False
            dropped = self._directory.report_bad(segment_id, _checked_id(namespace_id), block_hash, slot, generation)
            self._orders_changed.notify_all()
        if dropped:
            log.warning("bad_block_reported", block=block_hash.hex()[:8], segment=segment, slot=slot)
        return dropped

    def topology(self, known_version: int) -> Topology | None:
        """The nodes, or None when the caller's version is the current one."""
        with self._lock:
            if known_version == self._members.version:
                return None
            if self._topology is None or self._topology.version != self._members.version:
                nodes = [_node_info(member) for member in self._members]
                self._topology = Topology(self._members.version, nodes)
            return self._topology

    # Nodes

    def join(
        self, node_id: str, incarnation: int, endpoints: tuple[str, ...], segments: tuple[MemberSegment, ...]
    ) -> Member:
        """A node dials in: what was known of it goes, and its inventory follows.

        Raises:
            UsageError: A segment that is another node's, or without capacity.
        """
        with self._lock:
            previous = self._members.get(node_id)
            if previous is not None and previous.state != MemberState.LOST and previous.incarnation != incarnation:
                raise UsageError(f"a live node is called {node_id!r}; give this one another --node-id")
            if previous is not None:
                self._drop_segments(previous)
            member = self._members.join(node_id, incarnation, endpoints, segments)
            try:
                for segment in segments:
                    number = self._directory.add_segment(segment.segment_id, node_id, segment.capacity_bytes)
                    self._directory.set_accepting(segment.segment_id, accepting=False)
                    member.numbers.append(number)
            except BaseException:
                self._drop_segments(member)
                self._members.set_state(member, MemberState.LOST)
                raise
        log.info("node_joined", node=node_id, segments=len(segments), endpoints=list(endpoints))
        return member

    def take_inventory(
        self, member: Member, segment_id: bytes, document: bytes, blocks: list[AnnouncedBlock]
    ) -> list[AnnouncedBlock]:
        """Part of a node's inventory; the blocks the node must free.

        Raises:
            UsageError: A segment that the node did not name when it joined.
        """
        namespace = parse_namespace(document)
        with self._lock:
            self._check_session(member)
            if all(segment.segment_id != segment_id for segment in member.segments):
                raise UsageError(f"segment {segment_id.hex()} is not of node {member.node_id}; join with it first")
            self._directory.open_namespace(namespace)
            wanted = self._directory.announce(segment_id, namespace.id, blocks)
        return [block for block, want in zip(blocks, wanted, strict=True) if not want]

    def ready(self, member: Member) -> None:
        """The node's inventory is complete: blocks may be placed on it, unless it said meanwhile that it drains."""
        with self._lock:
            self._check_session(member)
            for segment in member.segments:
                self._directory.set_accepting(segment.segment_id, accepting=not member.drains)
            self._members.set_state(member, MemberState.DRAINING if member.drains else MemberState.READY)
        log.info("node_ready", node=member.node_id)

    def draining(self, member: Member) -> None:
        """The node takes no new blocks."""
        with self._lock:
            self._check_session(member)
            for segment in member.segments:
                self._directory.set_accepting(segment.segment_id, accepting=False)
            self._members.set_state(member, MemberState.DRAINING)
            member.drains = True
        log.info("node_draining", node=member.node_id)

    def heard(self, member: Member, orders_applied: int) -> None:
        """A heartbeat, or any other sign of life."""
        with self._lock:
            self._check_session(member)
            self._members.heard(member)
            self._directory.acknowledge(member.node_id, orders_applied)

    def leave(self, member: Member) -> None:
        """The node's stream has ended: its blocks are no longer offered."""
        with self._lock:
            if self._members.of_session(member.session) is not member:
                return
            if member.leaves:
                self._members.forget(member)
            else:
                self._members.set_state(member, MemberState.LOST)
            self._drop_segments(member)
            self.mover.left(member)
            self._orders_changed.notify_all()
        log.info("node_left", node=member.node_id)

    def wait_for_orders(self, member: Member, after: int, timeout_s: float) -> list[Order]:
        """Orders numbered above ``after``, waiting up to ``timeout_s`` for some, or for another mode of the node.

        Raises:
            UnavailableError: The session is over.
        """
        with self._orders_changed:
            self._check_session(member)
            orders, mode = self._directory.orders(member.node_id, after, ORDERS_PER_MESSAGE), member.mode
            if not orders and mode == member.mode_told:
                self._orders_changed.wait(timeout_s)
                self._check_session(member)
                orders = self._directory.orders(member.node_id, after, ORDERS_PER_MESSAGE)
            return orders

    def fetch(self, member: Member, copy_number: int) -> membership_pb2.FetchBlocks | None:
        """What tells ``member`` to fetch the blocks of a copy; None when that has ended, or its source is gone."""
        with self._lock:
            copy = self._directory.copy(copy_number)
            if copy is None or copy.destination.node_id != member.node_id:
                return None
            source = self._members.get(copy.source.node_id)
            if source is None or source.state == MemberState.LOST:
                self._directory.abort(copy_number)
                return None
            namespace = self._directory.namespaces()[copy.namespace]
            chain = Slice(
                self.incarnation, copy.number, namespace.id, namespace.block_bytes, self.settings.reservation_ttl_s
            )
            return fetch_message(chain, copy, source, member)

    def commit(
        self,
        session: int,
        segment_id: bytes,
        reservation: int,
        written: list[tuple[bytes, int, int, int, int]],
    ) -> list[CommitStatus]:
        """See `Directory.commit`; everything is stale from a node whose session is over."""
        with self._lock:
            member = self._members.of_session(session)
            if member is None or all(s.segment_id != segment_id for s in member.segments):
                return [CommitStatus.STALE] * len(written)
            statuses = self._directory.commit(reservation, segment_id, written)
        self.mover.settled()
        return statuses

    def gone(self, session: int, segment_id: bytes, namespace_id: bytes, slots: list[tuple[bytes, int, int]]) -> int:
        """(hash, slot, generation) that a node no longer has; how many the directory named."""
        with self._lock:
            member = self._members.of_session(session)
            if member is None or all(s.segment_id != segment_id for s in member.segments):
                return 0
            namespace_id = _checked_id(namespace_id)
            return sum(self._directory.gone(segment_id, namespace_id, *slot) for slot in slots)

    # Operators and housekeeping

    def explain(self, namespace_id: bytes, block_hash: bytes) -> MissReason | None:
        """See `Directory.explain`."""
        with self._lock:
            return self._directory.explain(_checked_id(namespace_id), block_hash)

    def pin(self, namespace_id: bytes, block_hash: bytes, ttl_s: float | None) -> bool:
        """See `Directory.pin`."""
        with self._lock:
            return self._directory.pin(_checked_id(namespace_id), block_hash, ttl_s)

    def unpin(self, namespace_id: bytes, block_hash: bytes) -> bool:
        """See `Directory.unpin`."""
        with self._lock:
            return self._directory.unpin(_checked_id(namespace_id), block_hash)

    def status(self) -> MetaStatus:
        """What operators see, now."""
        topology = self.topology(0)
        assert topology is not None
        with self._lock:
            return MetaStatus(
                incarnation=self.incarnation,
                topology=topology,
                namespaces=self._directory.namespaces(),
                stats=self._directory.stats(),
                used={s.number: (s.used_bytes, s.blocks) for s in self._directory.segments()},
            )

    def tick(self) -> None:
        """Free abandoned reservations, lose silent nodes, copy what is hot; called every heartbeat or so."""
        with self._lock:
            self._directory.expire()
            silent = self._members.silent()
        for member in silent:
            log.warning("node_silent", node=member.node_id, ttl_s=self.settings.node_ttl_s)
            self.leave(member)
        self.mover.tick()

    def check_integrity(self) -> None:
        """Assert the directory's invariants; for tests."""
        with self._lock:
            self._directory.check_integrity()

    def _drop_segments(self, member: Member) -> None:
        # As many as it has opened: the others may be of another node.
        for segment, _ in zip(member.segments, member.numbers, strict=False):
            self._directory.lose_segment(segment.segment_id)
        member.numbers.clear()

    def _check_session(self, member: Member) -> None:
        if self._members.of_session(member.session) is not member:
            raise UnavailableError(f"the session of node {member.node_id} is over; dial in again")

    def _member_of(self, number: int) -> Member:
        """The node of an open segment."""
        member = self._members.get(self._directory.segment(number).node_id)
        assert member is not None
        return member

    def _lease_s(self, lease_s: float) -> float:
        return min(lease_s, self.settings.lease_max_s)


def _checked_id(namespace_id: bytes) -> bytes:
    if len(namespace_id) != NAMESPACE_ID_BYTES:
        raise InvalidHashError(f"namespace id of {len(namespace_id)} bytes; it has {NAMESPACE_ID_BYTES}")
    return namespace_id


def _node_info(member: Member) -> NodeInfo:
    segments = [
        SegmentInfo(number, segment.segment_id, segment.medium, segment.capacity_bytes)
        for number, segment in zip(member.numbers, member.segments, strict=False)
    ]
    return NodeInfo(member.node_id, member.incarnation, member.state, list(member.endpoints), segments)
