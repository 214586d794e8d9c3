"""A metadata service without state of its own: any number of them serve one pool, over one Redis.

There is no lock round the directory: each operation is one function in Redis. While the state cannot be asked, look-ups
are misses and writes are refused.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.core.clock import Clock
from kvpool.core.directory import CommitStatus, Inventory, Location, Match, MissReason, Order
from kvpool.core.errors import (
    CapacityError,
    InvalidHashError,
    StateAwayError,
    StateFaultError,
    UnavailableError,
    UnknownNamespaceError,
    UsageError,
)
from kvpool.core.keys import checked_id, hash_at
from kvpool.core.limits import HASH_BYTES, NAMESPACE_ID_BYTES, RESERVATION_S_MAX
from kvpool.core.members import Member, MemberSegment, MemberState, Scrub
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.meta.granting import Granting
from kvpool.meta.results import MetaStatus, Reserved
from kvpool.meta.service import GRANTS_BYTES_MAX, NOBODYS, ORDERS_PER_MESSAGE
from kvpool.meta.shared import nodes, servers
from kvpool.meta.shared.housekeeping import keep_house
from kvpool.meta.shared.keeper import Keeper
from kvpool.meta.shared.members import Said
from kvpool.meta.shared.missing import NoDrains, NoQuotas
from kvpool.meta.shared.reads import SharedReads
from kvpool.meta.shared.records import ServerRecord
from kvpool.meta.shared.showing import status_of
from kvpool.meta.shared.state import State
from kvpool.meta.store.base import Store
from kvpool.ops.admission import Admission
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import MetaSettings
from kvpool.ops.version import __version__
from kvpool.transport.wire.messages import Topology
from kvpool.v1 import common_pb2, membership_pb2

ORDERS_POLL_S = 0.25
"""How often outboxes are read for a node's stream; what a writer's room needs travels in its grants."""


Answer = TypeVar("Answer")

log = get_logger(__name__)


class SharedMetaService:
    """See `kvpool.meta.serving.Serving`. Thread-safe.

    Args:
        settings: Limits and times; ``state`` says where Redis is.
        clock: Monotonic seconds.
        random_bytes: Source of incarnation, epochs, sessions and keys.
        on_recovered: Called when what all nodes hold is known; must not call back.

    Raises:
        SettingsError: It cannot work so, or Redis cannot.
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
        self.requests = Admission("look-ups and reservations", settings.requests_max)
        self.work = threading.Event()
        self.mover = NoDrains()
        self.quotas = NoQuotas()
        self._on_recovered = on_recovered
        self._stopping = threading.Event()
        self._keeper = Keeper(settings, clock, random_bytes)
        self._ask = self._keeper.ask
        self.reads = SharedReads(self._keeper)
        self._here = ServerRecord(self.incarnation, "", __version__)

    @property
    def fence(self) -> int:
        """The epoch: grants carry it, and nodes obey it."""
        return self._keeper.usable().epoch.number

    @property
    def away(self) -> int:
        """Calls that found the state away."""
        return self._keeper.away

    # Clients

    def open_namespace(self, document: bytes) -> bytes:
        """See `MetaService.open_namespace`."""
        namespace = parse_namespace(document)
        self._ask(lambda state: state.store.open_namespace(namespace))
        return namespace.id

    def namespace(self, namespace_id: bytes) -> Namespace:
        """See `MetaService.namespace`."""
        return self._ask(lambda state: state.store.namespace(checked_id(namespace_id)))

    def visible(self, namespace_id: bytes, tenant: str | None) -> bytes:
        """See `MetaService.visible`. While the state is away nobody's id is known to be the caller's."""
        if tenant is None or len(namespace_id) != NAMESPACE_ID_BYTES:
            return namespace_id
        try:
            own = self._ask(lambda state: state.store.is_of(namespace_id, tenant))
        except StateAwayError:
            own = False
        return namespace_id if own else NOBODYS

    def match(self, namespace_id: bytes, hashes: bytes, first: int, lease_s: float) -> Match:
        """See `MetaService.match`; a miss while the state is away."""
        lease_s = min(lease_s, self.settings.lease_max_s)
        try:
            with self.requests:
                return self._ask(lambda state: state.store.match(checked_id(namespace_id), hashes, first, lease_s))
        except StateAwayError:
            return Match(0, MissReason.RECOVERING)
        except UnknownNamespaceError:
            if self._is_recovering():
                return Match(0, MissReason.RECOVERING)
            raise

    def release(self, lease: int, tenant: str | None = None) -> bool:
        """See `MetaService.release`."""

        def release(state: State) -> bool:
            if tenant is not None and state.store.tenant_of(lease) != tenant:
                return False
            return state.store.release(lease)

        try:
            return self._ask(release)
        except StateAwayError:
            return False

    def locate(self, namespace_id: bytes, hashes: bytes, first: int, shard: int | None) -> Location:
        """See `MetaService.locate`; a miss while the state is away."""

        def locate(state: State) -> Location:
            location = state.store.locate(checked_id(namespace_id), hashes, first, shard)
            # A grant for a session that has ended opens nothing.
            if self.reads.is_on or not state.members.numbers.issuperset(location.segment):
                state.members.refresh()
            return location

        try:
            with self.requests:
                return self._ask(locate)
        except StateAwayError:
            return Location.nothing(MissReason.RECOVERING)
        except UnknownNamespaceError:
            if self._is_recovering():
                return Location.nothing(MissReason.RECOVERING)
            raise

    def reserve(
        self, namespace_id: bytes, hashes: bytes, first: int, parent: bytes, owner: str, ttl_s: float
    ) -> Reserved:
        """See `MetaService.reserve`."""
        namespace_id = checked_id(namespace_id)
        if len(parent) not in (0, HASH_BYTES):
            raise InvalidHashError(f"parent is {len(parent)} bytes; a block hash is {HASH_BYTES}")
        ttl_s = min(ttl_s or self.settings.reservation_ttl_s, RESERVATION_S_MAX)

        def reserve(state: State) -> Reserved:
            result = state.store.reserve(namespace_id, hashes, first, parent, owner=owner, ttl_s=ttl_s)
            state.members.refresh()
            above = parent if not first else hash_at(hashes, first - 1)
            chain = (above or bytes(HASH_BYTES)) + hashes[first * HASH_BYTES :]
            granting = Granting(state, state, state.epoch.number, state.reads)
            try:
                grants = granting.grants(state.store.namespace(namespace_id), result, chain, ttl_s)
                size_bytes = sum(len(grant.grant) + len(grant.blocks) for grant in grants)
                if size_bytes > GRANTS_BYTES_MAX:
                    raise CapacityError(f"grants of {size_bytes} bytes in one reservation; reserve fewer blocks")
            except (CapacityError, UnavailableError):
                state.store.abort(result.reservation)
                raise
            return Reserved(result, grants)

        with self.requests:
            return self._ask(reserve)

    def abort(
        self, reservation: int, hashes: list[bytes] | None, *, crowded: bool = False, tenant: str | None = None
    ) -> int:
        """See `MetaService.abort`; what cannot be told ends at its deadline."""

        def abort(state: State) -> int:
            if tenant is not None and state.store.tenant_of(reservation) != tenant:
                return 0
            return state.store.abort(reservation, hashes, crowded=crowded)

        try:
            return self._ask(abort)
        except StateAwayError:
            return 0

    def report_bad(self, namespace_id: bytes, block_hash: bytes, segment_id: bytes, slot: int, generation: int) -> bool:
        """See `MetaService.report_bad`."""
        what = (segment_id, checked_id(namespace_id), block_hash, slot, generation)
        try:
            return self._ask(lambda state: state.store.report_bad(*what))
        except StateAwayError:
            return False

    def topology(self, known_version: int) -> Topology | None:
        """See `MetaService.topology`."""
        state = self._keeper.latest
        if state is None:
            return None if not known_version else Topology(0, [])
        return None if state.members.version == known_version else nodes.topology(state)

    # Nodes

    def join(
        self,
        node_id: str,
        incarnation: int,
        endpoints: tuple[str, ...],
        segments: tuple[MemberSegment, ...],
        version: str = "",
    ) -> Member:
        """See `MetaService.join`."""
        named = (node_id, incarnation, endpoints, segments, version, self.incarnation)
        member = self._ask(lambda state: nodes.join(state, *named))
        log.info("node_joined", node=node_id, segments=len(segments), endpoints=list(endpoints))
        return member

    def take_inventory(self, member: Member, segment_id: bytes, document: bytes, part: Inventory) -> NDArray[np.bool_]:
        """See `MetaService.take_inventory`."""
        namespace = parse_namespace(document)
        if all(segment.segment_id != segment_id for segment in member.segments):
            raise UsageError(f"segment {segment_id.hex()} is not of node {member.node_id}; join with it first")

        def take(state: State) -> NDArray[np.bool_]:
            state.store.open_namespace(namespace)
            wanted = state.store.announce(segment_id, namespace.id, part)
            state.members.refresh()
            if not state.members.is_current(member):
                nodes.lose_late(state, member, segment_id, namespace.id)
            return wanted

        wanted = self._ask(take)
        self._check_session(member)
        return wanted

    def ready(self, member: Member) -> None:
        """See `MetaService.ready`."""
        if not self._ask(lambda state: nodes.ready(state, member)):
            raise UnavailableError(f"the session of node {member.node_id} is over; dial in again")
        member.state = MemberState.READY
        log.info("node_ready", node=member.node_id)
        self.work.set()

    def draining(self, member: Member) -> None:
        """See `MetaService.draining`."""
        if not self._ask(lambda state: nodes.draining(state, member)):
            raise UnavailableError(f"the session of node {member.node_id} is over; dial in again")
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
        """See `MetaService.heard`; while the state is away a node's stream stays."""
        scrub = scrub or Scrub()
        done = (scrub.passes, scrub.checked_blocks, scrub.checked_bytes, scrub.bad_blocks, scrub.retired_bytes)
        said = Said((*done, scrub.progress), dict(fetched_bytes or {}), dict(moved_bytes or {}))

        def hear(state: State) -> bool:
            current = state.members.heard(member, said)
            if current:
                state.store.acknowledge(member.node_id, orders_applied)
                nodes.take_segments(state, member, segments)
                record = state.members.record(member.node_id)
                if record is not None:
                    nodes.set_quiet(state, record, quiet=False)
            return current

        with suppress(StateAwayError, StateFaultError):
            if not self._ask(hear):
                raise UnavailableError(f"the session of node {member.node_id} is over; dial in again")

    def leave(self, member: Member) -> None:
        """See `MetaService.leave`. The streams of a service that stops end too: their nodes go to another."""
        if self._stopping.is_set():
            return
        with suppress(StateAwayError):
            if self._ask(lambda state: nodes.lose(state, member.node_id, member.session)):
                log.info("node_left", node=member.node_id)
                self.work.set()

    def wait_for_orders(self, member: Member, after: int, timeout_s: float) -> list[Order]:
        """See `MetaService.wait_for_orders`."""
        orders: list[Order] = []
        with suppress(StateAwayError):
            if member.state != MemberState.JOINING:
                self._ask(lambda state: state.members.refresh())
                self._check_session(member)
                orders = self._ask(lambda state: state.store.orders(member.node_id, after, ORDERS_PER_MESSAGE))
        if not orders:
            self._stopping.wait(min(timeout_s, ORDERS_POLL_S))
        return orders

    def fetch(self, member: Member, copy_number: int) -> membership_pb2.FetchBlocks | None:  # noqa: ARG002
        """See `MetaService.fetch`: there are no copies."""
        return None

    def commit(
        self, session: int, segment_id: bytes, reservation: int, written: list[tuple[bytes, int, int, int, int]]
    ) -> list[CommitStatus]:
        """See `MetaService.commit`. Whether the session is over is looked at last: what came late then goes."""
        stale = [CommitStatus.STALE] * len(written)

        def commit(state: State) -> list[CommitStatus]:
            record = state.members.of_session(session)
            if record is None or all(segment[0] != segment_id for segment in record.segments):
                return stale
            statuses = state.store.commit(reservation, segment_id, written)
            state.members.refresh()
            if state.members.of_session(session) is not None:
                return statuses
            numbers = dict(zip(record.in_use(), record.numbers, strict=False))
            if segment_id in numbers:
                state.store.lose_late_write(numbers[segment_id], reservation)
            return stale

        return self._ask(commit)

    def node_of(self, session: int) -> str | None:
        """See `MetaService.node_of`."""
        record = self._ask(lambda state: state.members.of_session(session))
        return None if record is None else record.node_id

    def gone(
        self, session: int, segment_id: bytes, namespace_id: bytes, slots: list[tuple[bytes, int, int]], *, bad: bool
    ) -> int:
        """See `MetaService.gone`."""
        namespace_id = checked_id(namespace_id)

        def gone(state: State) -> int:
            record = state.members.of_session(session)
            if record is None or all(segment[0] != segment_id for segment in record.segments):
                return 0
            return sum(state.store.gone(segment_id, namespace_id, *slot, bad=bad) for slot in slots)

        return self._ask(gone)

    # Operators and housekeeping

    def ask(self, question: Callable[[Store, Iterable[Member]], Answer]) -> Answer:
        """See `MetaService.ask`."""
        return self._ask(lambda state: question(state.store, state.members))

    def explain(self, namespace_id: bytes, block_hash: bytes) -> MissReason | None:
        """See `MetaService.explain`."""
        return self._ask(lambda state: state.store.explain(checked_id(namespace_id), block_hash))

    def pin(self, namespace_id: bytes, block_hash: bytes, ttl_s: float | None) -> bool:
        """See `MetaService.pin`."""
        return self._ask(lambda state: state.store.pin(checked_id(namespace_id), block_hash, ttl_s))

    def unpin(self, namespace_id: bytes, block_hash: bytes) -> bool:
        """See `MetaService.unpin`."""
        return self._ask(lambda state: state.store.unpin(checked_id(namespace_id), block_hash))

    def status(self) -> MetaStatus:
        """See `MetaService.status`."""
        return self._ask(lambda state: status_of(state, self.incarnation, self.clock() - self.started_s))

    def tick(self) -> None:
        """See `MetaService.tick`; every service of the pool does all of it, whoever comes first."""
        self.work.clear()
        try:
            self._keeper.look()
            self._ask(self._keep_house)
        except StateAwayError as error:
            log.warning("state_away", error=str(error))

    def resumed(self) -> None:
        """See `MetaService.resumed`: others may have lost this one's nodes meanwhile, which come back by themselves."""
        log.warning("service_was_paused")

    def started(self, address: str) -> None:
        """Clients reach this service at ``address``."""
        self._here.address = address
        self.tick()

    def stopping(self) -> None:
        """The service is about to stop: its streams end, and their nodes are not lost."""
        self._stopping.set()

    def close(self) -> None:
        """The service has stopped."""
        with suppress(StateAwayError):
            self._ask(lambda state: servers.say_gone(state.store.link, state.epoch, self.incarnation))
        self._keeper.close()

    def _keep_house(self, state: State) -> None:
        keep_house(state, self.settings.node_ttl_s, self._here, self._stopping)
        if state.follow_recovery():
            lasted_s = state.recovery.lasted_s
            log.info("recovered", nodes=state.recovery.reported_nodes, seconds=round(lasted_s, 3))
            self._on_recovered()
        self._keeper.forget_ended()

    def _is_recovering(self) -> bool:
        state = self._keeper.latest
        return state is None or state.recovery.active

    def _check_session(self, member: Member) -> None:
        if not self._keeper.usable().members.is_current(member):
            raise UnavailableError(f"the session of node {member.node_id} is over; dial in again")
