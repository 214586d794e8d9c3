"""A metadata service without state of its own: any number of them serve one pool, over one Redis.

There is no lock round the directory: each operation is one function in Redis. Whenever a connection was made anew the
service looks whether the state behind it is still the one it knows; if it is not, what it has just been told is not
passed on. While the state cannot be asked, look-ups are misses and writes are refused.
"""

import threading
import time
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
    SettingsError,
    UnavailableError,
    UnknownNamespaceError,
    UsageError,
)
from kvpool.core.keys import checked_id, hash_at
from kvpool.core.limits import HASH_BYTES, RESERVATION_S_MAX
from kvpool.core.members import Member, MemberSegment, MemberState, Scrub
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.meta.granting import Granting
from kvpool.meta.results import MetaStatus, RecoveryStatus, Reserved, StateStatus
from kvpool.meta.service import GRANTS_BYTES_MAX, ORDERS_PER_MESSAGE
from kvpool.meta.shared import nodes, servers
from kvpool.meta.shared.drains import NoDrains
from kvpool.meta.shared.members import Said
from kvpool.meta.shared.state import State
from kvpool.meta.store.base import Store
from kvpool.meta.store.link import POOL, RedisLink, StateAwayError
from kvpool.meta.store.pool import current_epoch
from kvpool.ops.admission import Admission
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import MetaSettings
from kvpool.ops.version import __version__
from kvpool.transport.wire.messages import Topology
from kvpool.v1 import common_pb2, membership_pb2

ORDERS_POLL_S = 0.25
"""How often outboxes are read for a node's stream; what a writer's room needs travels in its grants."""

LOSS_BLOCKS = 512
LOSS_PAUSE_S = 0.001
SERVER_TTL_S = 5.0
AWAY_PAUSE_S = 0.5
"""A state that did not answer is asked again so often."""

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
        self.away = 0
        self._random_bytes = random_bytes
        self._on_recovered = on_recovered
        self._link = _open_link(settings)
        self._looking = threading.Lock()
        self._stopping = threading.Event()
        self._state: State | None = None
        self._connects_seen = -1
        self._away_until_s = 0.0
        self._ended: list[int] = []
        self._here = servers.ServerRecord(self.incarnation, "", __version__)
        with suppress(StateAwayError):  # it may come later
            self._look(patient=True)

    @property
    def fence(self) -> int:
        """The epoch: grants carry it, and nodes obey it."""
        return self._usable().epoch.number

    # Clients

    def open_namespace(self, document: bytes) -> bytes:
        """See `MetaService.open_namespace`."""
        namespace = parse_namespace(document)
        self._ask(lambda state: state.store.open_namespace(namespace))
        return namespace.id

    def namespace(self, namespace_id: bytes) -> Namespace:
        """See `MetaService.namespace`."""
        return self._ask(lambda state: state.store.namespace(checked_id(namespace_id)))

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

    def release(self, lease: int) -> bool:
        """See `MetaService.release`."""
        try:
            return self._ask(lambda state: state.store.release(lease))
        except StateAwayError:
            return False

    def locate(self, namespace_id: bytes, hashes: bytes, first: int, shard: int | None) -> Location:
        """See `MetaService.locate`; a miss while the state is away."""

        def locate(state: State) -> Location:
            location = state.store.locate(checked_id(namespace_id), hashes, first, shard)
            if not state.members.numbers.issuperset(location.segment):
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
            granting = Granting(state, state, state.epoch.number)
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

    def abort(self, reservation: int, hashes: list[bytes] | None, *, crowded: bool = False) -> int:
        """See `MetaService.abort`; what cannot be told ends at its deadline."""
        try:
            return self._ask(lambda state: state.store.abort(reservation, hashes, crowded=crowded))
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
        state = self._state
        if state is None:
            return None if not known_version else Topology(0, [])
        return None if state.members.version == known_version else nodes.topology(state)

    # Nodes

    def join(
        self, node_id: str, incarnation: int, endpoints: tuple[str, ...], segments: tuple[MemberSegment, ...]
    ) -> Member:
        """See `MetaService.join`."""
        named = (node_id, incarnation, endpoints, segments, self.incarnation)
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
                self._lose_late(state, member, segment_id, namespace.id)
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
    ) -> None:
        """See `MetaService.heard`; while the state is away a node's stream stays."""
        scrub = scrub or Scrub()
        done = (scrub.passes, scrub.checked_blocks, scrub.checked_bytes, scrub.bad_blocks, scrub.retired_bytes)
        said = Said((*done, scrub.progress), dict(fetched_bytes or {}))

        def hear(state: State) -> bool:
            current = state.members.heard(member, said)
            if current:
                state.store.acknowledge(member.node_id, orders_applied)
                nodes.take_segments(state, member, segments)
            return current

        with suppress(StateAwayError):
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
            return statuses if state.members.of_session(session) is not None else stale

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
        return self._ask(self._status)

    def tick(self) -> None:
        """See `MetaService.tick`; every service of the pool does all of it, whoever comes first."""
        self.work.clear()
        try:
            self._look(patient=True)
            self._away_until_s = 0.0
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
            self._ask(lambda state: servers.say_gone(self._link, state.epoch, self.incarnation))
        self._link.close()

    def _keep_house(self, state: State) -> None:
        state.members.refresh()
        servers.say_here(self._link, state.epoch, self._here)
        servers.drop_silent(self._link, state.epoch, SERVER_TTL_S)
        state.store.expire()
        for record in state.members.silent(self.settings.node_ttl_s):
            log.warning("node_silent", node=record.node_id, ttl_s=self.settings.node_ttl_s)
            nodes.lose(state, record.node_id, record.session)
        while state.store.drop_lost(LOSS_BLOCKS) and not self._stopping.is_set():
            time.sleep(LOSS_PAUSE_S)
        if state.follow_recovery():
            lasted_s = state.recovery.lasted_s
            log.info("recovered", nodes=state.recovery.reported_nodes, seconds=round(lasted_s, 3))
            self._on_recovered()
        while self._ended:
            self._forget_epoch(self._ended.pop())

    def _forget_epoch(self, number: int) -> None:
        """Free what Redis holds of an epoch that has ended."""
        for prefix in (f"kvpool:{number:x}:", f"{POOL}{number:x}:"):
            keys = self._link.keys_of(f"{prefix}*")
            for key in keys:
                self._link.run([("UNLINK", key)])

    def _lose_late(self, state: State, member: Member, segment_id: bytes, namespace_id: bytes) -> None:
        for segment, number in zip(member.segments, member.numbers, strict=False):
            if segment.segment_id == segment_id:
                state.store.lose_late(number, namespace_id)

    def _status(self, state: State) -> MetaStatus:
        state.members.refresh_all()
        every = list(state.members)
        return MetaStatus(
            incarnation=self.incarnation,
            topology=nodes.topology(state),
            namespaces=state.store.namespaces(),
            stats=state.store.stats(),
            used={s.number: (s.used_bytes, s.blocks) for s in state.store.segments()},
            scrubs={member.node_id: member.scrub for member in every},
            fetched_bytes={member.node_id: member.fetched_bytes for member in every},
            off={member.node_id: member.off for member in every},
            recovery=RecoveryStatus.of(state.recovery),
            state=StateStatus(servers.health(self._link, state.epoch), servers.servers(self._link, state.epoch)),
        )

    def _is_recovering(self) -> bool:
        state = self._state
        return state is None or state.recovery.active

    def _check_session(self, member: Member) -> None:
        if not self._usable().members.is_current(member):
            raise UnavailableError(f"the session of node {member.node_id} is over; dial in again")

    # The state

    def _ask(self, question: Callable[[State], Answer]) -> Answer:
        """What the state answers, if it still is the one that was asked; raises StateAwayError."""
        try:
            state = self._usable()
            answer = question(state)
            if self._usable() is not state:
                raise StateAwayError("the pool's state was replaced; what was asked of the old one means nothing")
        except StateAwayError:
            self.away += 1
            self._connects_seen = -1
            self._away_until_s = self.clock() + AWAY_PAUSE_S
            raise
        return answer

    def _usable(self) -> State:
        if self._state is None or self._link.connects != self._connects_seen:
            self._look(patient=False)
        assert self._state is not None
        return self._state

    def _look(self, *, patient: bool) -> None:
        """See which state there is behind the connections made so far; raises StateAwayError.

        Who is not ``patient`` hears at once that it was away a moment ago: else every call would wait its time out.
        """
        with self._looking:
            if not patient and self.clock() < self._away_until_s:
                raise StateAwayError("the pool's state was away a moment ago; it is asked again within a second")
            connects = self._link.connects
            epoch = current_epoch(self._link, self._random_bytes)
            if self._state is None or self._state.epoch.number != epoch.number:
                if self._state is not None:
                    log.warning("epoch_ended", epoch=self._state.epoch.number, next=epoch.number)
                    self._ended.append(self._state.epoch.number)
                self._state = State.open(self._link, epoch, self.settings, self.clock, self._random_bytes)
            self._connects_seen = connects


def _open_link(settings: MetaSettings) -> RedisLink:
    if settings.policy != "lru":
        raise SettingsError(f"meta.policy is {settings.policy!r}; with meta.state only lru is there yet")
    password = settings.state_password_file
    assert settings.state is not None
    try:
        secret = None if password is None else password.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"meta.state_password_file cannot be read: {error}") from error
    return RedisLink(settings.state, settings.state_timeout_s, secret)
