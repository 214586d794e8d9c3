"""The metadata service without its wires: one lock round the directory and the members.

Every front door (gRPC servicers, framed sessions) calls these methods; nothing else touches the state.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.core.clock import Clock
from kvpool.core.directory import CommitStatus, Directory, Inventory, Location, Match, MissReason, Order
from kvpool.core.errors import CapacityError, InvalidHashError, UnavailableError, UsageError
from kvpool.core.keys import checked_id, hash_at
from kvpool.core.limits import FRAME_BODY_BYTES_MAX, HASH_BYTES, NAMESPACE_ID_BYTES, RESERVATION_S_MAX
from kvpool.core.members import Member, Members, MemberSegment, MemberState, Scrub
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.core.recovery import Recovery
from kvpool.meta.directory_config import directory_config
from kvpool.meta.granting import Granting
from kvpool.meta.losing import Losses
from kvpool.meta.moving import Mover
from kvpool.meta.quotas import Quotas
from kvpool.meta.read_granting import ReadGranting
from kvpool.meta.results import MetaStatus, RecoveryStatus, Reserved
from kvpool.meta.topology import TopologyView
from kvpool.ops.admission import Admission
from kvpool.ops.failpoints import failpoint
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import MetaSettings
from kvpool.transport.wire.messages import Topology
from kvpool.v1 import common_pb2, membership_pb2

ORDERS_PER_MESSAGE = 1024
GRANTS_BYTES_MAX = FRAME_BODY_BYTES_MAX * 3 // 4
"""Grants of one reservation, so that they fit the frame of its answer with the topology."""

NOBODYS = bytes(NAMESPACE_ID_BYTES)
"""An id that no namespace has: no digest is made of zeros alone."""

Answer = TypeVar("Answer")

log = get_logger(__name__)


class MetaService:
    """Directory and members behind one lock. Thread-safe.

    Args:
        settings: Limits and times.
        clock: Monotonic seconds.
        random_bytes: Source of incarnation, sessions and keys.
        on_recovered: Called once, when the directory is rebuilt; must not call back.

    Attributes:
        reads: Read grants.
        requests: Who is let in to ask for something new; what ends something begun always is.
        work: Set when `tick` has something to do that should not wait.
        away: Calls that found the state away: none, since it is here.
        mover: Copies blocks between nodes, and drains nodes.
        quotas: Limits of tenants.
    """

    def __init__(
        self,
        settings: MetaSettings,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        on_recovered: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.started_s = clock()
        self.incarnation = int.from_bytes(random_bytes(8), "little") >> 1
        epoch = int.from_bytes(random_bytes(4), "little") >> 1
        self._directory = Directory(clock, directory_config(settings, epoch))
        self._directory.set_recovering(recovering=True)
        self._recovery = Recovery(
            clock, settings.expected_nodes, settings.recovery_wait_s, settings.recovery_deadline_s
        )
        self._on_recovered = on_recovered
        self._members = Members(clock, random_bytes, settings.node_ttl_s)
        self._lock = threading.Lock()
        self.reads = ReadGranting(self._members, self.incarnation, clock, self._lock, self._members.version)
        self._granting = Granting(self._directory, self._members, self.incarnation, self.reads)
        self.requests = Admission("look-ups and reservations", settings.requests_max, self._lock)
        self._orders_changed = threading.Condition(self._lock)
        self._topology = TopologyView(self._members)
        self._losses = Losses(self._directory, self._lock)
        self.work = self._losses.pending
        self.away = 0
        self.mover = Mover(self._directory, self._members, self._orders_changed, settings, clock)
        self.quotas = Quotas(self._directory, self._lock, clock, self.work)

    @property
    def fence(self) -> int:
        """What grants carry and nodes obey."""
        return self.incarnation

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
            return self._directory.namespace(checked_id(namespace_id))

    def visible(self, namespace_id: bytes, tenant: str | None) -> bytes:
        """The id, for a caller of ``tenant`` (None: of all); in place of another's, or of none's, one that nobody has.

        What is asked about that is answered as for a namespace that is not open, by the same steps.
        """
        if tenant is None or len(namespace_id) != NAMESPACE_ID_BYTES:
            return namespace_id
        with self._lock:
            owner = self._directory.tenant_of(namespace=namespace_id)
        return namespace_id if owner == tenant else NOBODYS

    def match(self, namespace_id: bytes, hashes: bytes, first: int, lease_s: float) -> Match:
        """See `Directory.match`."""
        with self.requests:
            if self._may_come(namespace_id):
                return Match(0, MissReason.RECOVERING)
            return self._directory.match(checked_id(namespace_id), hashes, first, self._lease_s(lease_s))

    def release(self, lease: int, tenant: str | None = None) -> bool:
        """See `Directory.release`; a caller of ``tenant`` releases leases on its blocks alone."""
        with self._lock:
            if tenant is not None and self._directory.tenant_of(lease=lease) != tenant:
                return False
            return self._directory.release(lease)

    def locate(self, namespace_id: bytes, hashes: bytes, first: int, shard: int | None) -> Location:
        """See `Directory.locate`."""
        with self.requests:
            if self._may_come(namespace_id):
                return Location.nothing(MissReason.RECOVERING)
            location = self._directory.locate(checked_id(namespace_id), hashes, first, shard)
        self.mover.move_tiers()
        return location

    def reserve(
        self, namespace_id: bytes, hashes: bytes, first: int, parent: bytes, owner: str, ttl_s: float
    ) -> Reserved:
        """See `Directory.reserve`; ``ttl_s`` of 0 asks for the default. CapacityError: the grants fit no answer."""
        namespace_id = checked_id(namespace_id)
        if len(parent) not in (0, HASH_BYTES):
            raise InvalidHashError(f"parent is {len(parent)} bytes; a block hash is {HASH_BYTES}")
        ttl_s = min(ttl_s or self.settings.reservation_ttl_s, RESERVATION_S_MAX)
        failpoint("meta.reserve.before_place")
        with self.requests:
            result = self._directory.reserve(namespace_id, hashes, first, parent, owner=owner, ttl_s=ttl_s)
            above = parent if not first else hash_at(hashes, first - 1)
            chain = (above or bytes(HASH_BYTES)) + hashes[first * HASH_BYTES :]
            namespace = self._directory.namespace(namespace_id)
            grants = self._granting.grants(namespace, result, chain, ttl_s)
            size_bytes = sum(len(grant.grant) + len(grant.blocks) for grant in grants)
            if size_bytes > GRANTS_BYTES_MAX:
                self._directory.abort(result.reservation)
                raise CapacityError(f"grants of {size_bytes} bytes in one reservation; reserve fewer blocks at a time")
        return Reserved(result, grants)

    def abort(
        self, reservation: int, hashes: list[bytes] | None, *, crowded: bool = False, tenant: str | None = None
    ) -> int:
        """See `Directory.abort`; a caller of ``tenant`` gives up what it writes alone."""
        with self._lock:
            if tenant is not None and self._directory.tenant_of(reservation=reservation) != tenant:
                return 0
            blocks = self._directory.abort(reservation, hashes, crowded=crowded)
        self.mover.settled()
        return blocks

    def report_bad(self, namespace_id: bytes, block_hash: bytes, segment_id: bytes, slot: int, generation: int) -> bool:
        """See `Directory.report_bad`; False for a segment that is not open any more."""
        with self._lock:
            dropped = self._directory.report_bad(segment_id, checked_id(namespace_id), block_hash, slot, generation)
            self._orders_changed.notify_all()
        if dropped:
            log.warning("bad_block_reported", block=block_hash.hex()[:8], segment=segment_id.hex()[:8], slot=slot)
        return dropped

    def topology(self, known_version: int) -> Topology | None:
        """The nodes, or None when the caller's version is the current one."""
        with self._lock:
            return self._topology.since(known_version)

    # Nodes

    def join(
        self,
        node_id: str,
        incarnation: int,
        endpoints: tuple[str, ...],
        segments: tuple[MemberSegment, ...],
        version: str = "",
    ) -> Member:
        """A node dials in, of software ``version``: what was known of it goes, and its inventory follows.

        Raises:
            UsageError: A segment that is another node's, or without capacity.
        """
        with self._lock:
            previous = self._members.get(node_id)
            if previous is not None and previous.state != MemberState.LOST and previous.incarnation != incarnation:
                raise UsageError(f"a live node is called {node_id!r}; give this one another --node-id")
            if previous is not None:
                self._losses.begin(previous)
                self.mover.left(previous)
            member = self._members.join(node_id, incarnation, endpoints, segments)
            member.version = version
            try:
                for segment in member.segments:
                    where = (segment.segment_id, node_id, segment.capacity_bytes, segment.medium)
                    number = self._directory.add_segment(*where)
                    self._directory.set_accepting(segment.segment_id, accepting=False)
                    member.numbers.append(number)
            except BaseException:
                self._losses.begin(member)
                self._members.set_state(member, MemberState.LOST)
                raise
            self._recovery.joined(node_id)
        log.info("node_joined", node=node_id, segments=len(segments), endpoints=list(endpoints))
        return member

    def take_inventory(self, member: Member, segment_id: bytes, document: bytes, part: Inventory) -> NDArray[np.bool_]:
        """Part of a node's inventory; False for each block that the node must free.

        Raises:
            UsageError: A segment that the node did not name when it joined.
        """
        namespace = parse_namespace(document)
        with self._lock:
            self._check_session(member)
            if all(segment.segment_id != segment_id for segment in member.segments):
                raise UsageError(f"segment {segment_id.hex()} is not of node {member.node_id}; join with it first")
            self._members.heard(member)
            self._directory.open_namespace(namespace)
            return self._directory.announce(segment_id, namespace.id, part)

    def ready(self, member: Member) -> None:
        """The node's inventory is complete: blocks may be placed on it, unless it said meanwhile that it drains."""
        failpoint("meta.ready.before_admit")
        with self._lock:
            self._check_session(member)
            self.mover.admit(member)
            self._recovery.reported(member.node_id)
        log.info("node_ready", node=member.node_id)
        self._end_recovery()

    def draining(self, member: Member) -> None:
        """The node takes no new blocks."""
        with self._lock:
            self._check_session(member)
            member.drains = True
            self.mover.admit(member)
        log.info("node_draining", node=member.node_id)

    def heard(
        self,
        member: Member,
        orders_applied: int,
        scrub: Scrub | None = None,
        segments: Sequence[common_pb2.Segment] = (),
        fetched_bytes: Mapping[str, int] | None = None,
        moved_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """A heartbeat, or any other sign of life; ``segments`` are the node's as it sees them now."""
        with self._lock:
            self._check_session(member)
            self._members.heard(member)
            self._directory.acknowledge(member.node_id, orders_applied)
            if scrub is not None:
                member.scrub = scrub
            if fetched_bytes is not None:
                member.fetched_bytes = dict(fetched_bytes)
            if moved_bytes is not None:
                member.moved_bytes = dict(moved_bytes)
            for segment in self._losses.failing(member, segments):
                self._members.turned_off(member, segment)

    def leave(self, member: Member) -> None:
        """The node's stream has ended: its blocks are no longer offered."""
        with self._lock:
            if self._members.of_session(member.session) is not member:
                return
            if member.leaves:
                self._members.forget(member)
            else:
                self._members.set_state(member, MemberState.LOST)
            self._losses.begin(member)
            self._recovery.left(member.node_id)
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
        """What tells ``member`` to fetch the blocks of a copy; None when that has ended, or its source is gone.

        Raises:
            UnavailableError: The session is over.
        """
        with self._lock:
            self._check_session(member)
            copy = self._directory.copy(copy_number)
            if copy is None or copy.destination.node_id != member.node_id:
                return None
            source = self._members.get(copy.source.node_id)
            if source is None or source.state == MemberState.LOST:
                self._directory.abort(copy_number)
                return None
            return self._granting.fetch(copy, source, self.settings.reservation_ttl_s)

    def commit(
        self,
        session: int,
        segment_id: bytes,
        reservation: int,
        written: list[tuple[bytes, int, int, int, int]],
    ) -> list[CommitStatus]:
        """See `Directory.commit`; everything is stale from a node whose session is over."""
        failpoint("meta.commit.before_take")
        with self._lock:
            member = self._members.of_session(session)
            if member is None or all(s.segment_id != segment_id for s in member.segments):
                return [CommitStatus.STALE] * len(written)
            statuses = self._directory.commit(reservation, segment_id, written)
        failpoint("meta.commit.before_answer")
        self.mover.settled()
        return statuses

    def node_of(self, session: int) -> str | None:
        """The node whose current session this is; None for every older one."""
        with self._lock:
            member = self._members.of_session(session)
            return None if member is None else member.node_id

    def gone(
        self, session: int, segment_id: bytes, namespace_id: bytes, slots: list[tuple[bytes, int, int]], *, bad: bool
    ) -> int:
        """(hash, slot, generation) that a node no longer serves; how many the directory named."""
        with self._lock:
            member = self._members.of_session(session)
            if member is None or all(s.segment_id != segment_id for s in member.segments):
                return 0
            namespace_id = checked_id(namespace_id)
            return sum(self._directory.gone(segment_id, namespace_id, *slot, bad=bad) for slot in slots)

    # Operators and housekeeping

    def ask(self, question: Callable[[Directory, Members], Answer]) -> Answer:
        """Let ``question`` look at the state under the lock: it must be short, and change nothing."""
        with self._lock:
            return question(self._directory, self._members)

    def follow(self, on_first: Callable[[], None] | None) -> None:
        """Let somebody follow what becomes visible: see `Following`; None: nobody any more."""
        with self._lock:
            following = self._directory.following
            following.end() if on_first is None else following.begin(on_first)

    def explain(self, namespace_id: bytes, block_hash: bytes) -> MissReason | None:
        """See `Directory.explain`."""
        with self._lock:
            return self._directory.explain(checked_id(namespace_id), block_hash)

    def pin(self, namespace_id: bytes, block_hash: bytes, ttl_s: float | None) -> bool:
        """See `Directory.pin`; raises QuotaError."""
        with self._lock:
            return self._directory.pin(checked_id(namespace_id), block_hash, ttl_s)

    def unpin(self, namespace_id: bytes, block_hash: bytes) -> bool:
        """See `Directory.unpin`."""
        with self._lock:
            return self._directory.unpin(checked_id(namespace_id), block_hash)

    def status(self) -> MetaStatus:
        """What operators see, now."""
        topology = self.topology(0)
        assert topology is not None
        with self._lock:
            return MetaStatus(
                incarnation=self.incarnation,
                topology=topology,
                stats=self._directory.stats(),
                used={s.number: (s.used_bytes, s.blocks) for s in self._directory.segments()},
                scrubs={member.node_id: member.scrub for member in self._members},
                fetched_bytes={member.node_id: member.fetched_bytes for member in self._members},
                moved_bytes={member.node_id: member.moved_bytes for member in self._members},
                versions={member.node_id: member.version for member in self._members},
                off={member.node_id: member.off for member in self._members},
                recovery=RecoveryStatus.of(self._recovery),
                tenants=self._directory.tenants(),
                uptime_s=self.clock() - self.started_s,
            )

    def tick(self) -> None:
        """Free what was abandoned, lose silent nodes, drop what lost ones held, copy blocks; called each heartbeat."""
        failpoint("meta.tick.begin")
        self.work.clear()
        with self._lock:
            self._directory.expire()
            silent = self._members.silent()
            self.mover.heed_silence()
        for member in silent:
            log.warning("node_silent", node=member.node_id, ttl_s=self.settings.node_ttl_s)
            self.leave(member)
        self._end_recovery()
        self._losses.finish()
        self.quotas.tick()
        self.mover.tick()

    def resumed(self) -> None:
        """This process was paused: a silence that it slept through is nobody's."""
        with self._lock:
            for member in self._members:
                self._members.heard(member)
        log.warning("service_was_paused")

    def started(self, address: str) -> None:
        """See `Serving.started`."""

    def stopping(self) -> None:
        """See `Serving.stopping`."""

    def close(self) -> None:
        """See `Serving.close`."""

    def check_integrity(self) -> None:
        """Assert the directory's invariants; for tests."""
        with self._lock:
            self._directory.check_integrity()

    def _may_come(self, namespace_id: bytes) -> bool:
        """Whether the namespace is one that a node which has yet to report may have blocks of."""
        return self._recovery.active and not self._directory.knows(checked_id(namespace_id))

    def _end_recovery(self) -> None:
        with self._lock:
            if not self._recovery.ends():
                return
            self._directory.set_recovering(recovering=False)
            blocks = self._directory.stats().blocks
            nodes, lasted_s = self._recovery.reported_nodes, self._recovery.lasted_s
        log.info("recovered", nodes=nodes, blocks=blocks, seconds=round(lasted_s, 3))
        self._on_recovered()

    def _check_session(self, member: Member) -> None:
        if self._members.of_session(member.session) is not member:
            raise UnavailableError(f"the session of node {member.node_id} is over; dial in again")

    def _lease_s(self, lease_s: float) -> float:
        return min(lease_s, self.settings.lease_max_s)
