"""What the front doors ask of a metadata service, be its directory in its own memory or in Redis."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.core.clock import Clock
from kvpool.core.directory import CommitStatus, Inventory, Location, Match, MissReason, Order, TenantStats
from kvpool.core.members import Member, MemberSegment, Scrub
from kvpool.core.namespace import Namespace
from kvpool.meta.moving import DrainProgress
from kvpool.meta.results import MetaStatus, Reserved
from kvpool.meta.store.base import Store
from kvpool.ops.admission import Admission
from kvpool.ops.settings import MetaSettings
from kvpool.transport.wire.messages import ReadGrants, Topology
from kvpool.v1 import common_pb2, membership_pb2

Answer = TypeVar("Answer")


class Drains(Protocol):
    """See `kvpool.meta.moving.Mover`."""

    def drain(self, node_id: str, timeout_s: float, *, stay: bool) -> DrainProgress: ...  # noqa: D102
    def progress(self, node_id: str) -> DrainProgress: ...  # noqa: D102
    def cancel(self, node_id: str) -> DrainProgress: ...  # noqa: D102


class Reads(Protocol):
    """See `kvpool.meta.read_granting.ReadGranting`."""

    is_on: bool

    def since(self, namespace_id: bytes, known_version: int) -> ReadGrants | None: ...  # noqa: D102


class TenantLimiting(Protocol):
    """See `kvpool.meta.quotas.Quotas`."""

    def change(self, tenant: str, limits: Mapping[str, float], unlimited: Collection[str]) -> TenantStats: ...  # noqa: D102


class Serving(Protocol):
    """See `kvpool.meta.service.MetaService`, member by member.

    Attributes:
        incarnation: Of this process.
        fence: What grants carry and nodes obey; the same for all services of a pool.
    """

    @property
    def settings(self) -> MetaSettings: ...  # noqa: D102
    @property
    def clock(self) -> Clock: ...  # noqa: D102
    @property
    def started_s(self) -> float: ...  # noqa: D102
    @property
    def incarnation(self) -> int: ...  # noqa: D102
    @property
    def fence(self) -> int: ...  # noqa: D102
    @property
    def requests(self) -> Admission: ...  # noqa: D102
    @property
    def work(self) -> threading.Event: ...  # noqa: D102
    @property
    def mover(self) -> Drains: ...  # noqa: D102
    @property
    def reads(self) -> Reads: ...  # noqa: D102
    @property
    def quotas(self) -> TenantLimiting: ...  # noqa: D102
    @property
    def away(self) -> int: ...  # noqa: D102

    def open_namespace(self, document: bytes) -> bytes: ...  # noqa: D102
    def namespace(self, namespace_id: bytes) -> Namespace: ...  # noqa: D102
    def visible(self, namespace_id: bytes, tenant: str | None) -> bytes: ...  # noqa: D102
    def match(self, namespace_id: bytes, hashes: bytes, first: int, lease_s: float) -> Match: ...  # noqa: D102
    def release(self, lease: int, tenant: str | None = None) -> bool: ...  # noqa: D102
    def locate(self, namespace_id: bytes, hashes: bytes, first: int, shard: int | None) -> Location: ...  # noqa: D102
    def reserve(  # noqa: D102
        self, namespace_id: bytes, hashes: bytes, first: int, parent: bytes, owner: str, ttl_s: float
    ) -> Reserved: ...
    def abort(  # noqa: D102
        self, reservation: int, hashes: list[bytes] | None, *, crowded: bool = False, tenant: str | None = None
    ) -> int: ...
    def report_bad(  # noqa: D102
        self, namespace_id: bytes, block_hash: bytes, segment_id: bytes, slot: int, generation: int
    ) -> bool: ...
    def topology(self, known_version: int) -> Topology | None: ...  # noqa: D102

    def join(  # noqa: D102
        self,
        node_id: str,
        incarnation: int,
        endpoints: tuple[str, ...],
        segments: tuple[MemberSegment, ...],
        version: str = "",
    ) -> Member: ...
    def take_inventory(  # noqa: D102
        self, member: Member, segment_id: bytes, document: bytes, part: Inventory
    ) -> NDArray[np.bool_]: ...
    def ready(self, member: Member) -> None: ...  # noqa: D102
    def draining(self, member: Member) -> None: ...  # noqa: D102
    def heard(  # noqa: D102
        self,
        member: Member,
        orders_applied: int,
        scrub: Scrub | None = None,
        segments: Sequence[common_pb2.Segment] = (),
        fetched_bytes: Mapping[str, int] | None = None,
        moved_bytes: Mapping[str, int] | None = None,
    ) -> None: ...
    def leave(self, member: Member) -> None: ...  # noqa: D102
    def wait_for_orders(self, member: Member, after: int, timeout_s: float) -> list[Order]: ...  # noqa: D102
    def fetch(self, member: Member, copy_number: int) -> membership_pb2.FetchBlocks | None: ...  # noqa: D102
    def commit(  # noqa: D102
        self, session: int, segment_id: bytes, reservation: int, written: list[tuple[bytes, int, int, int, int]]
    ) -> list[CommitStatus]: ...
    def node_of(self, session: int) -> str | None: ...  # noqa: D102
    def gone(  # noqa: D102
        self, session: int, segment_id: bytes, namespace_id: bytes, slots: list[tuple[bytes, int, int]], *, bad: bool
    ) -> int: ...

    def ask(self, question: Callable[[Store, Iterable[Member]], Answer]) -> Answer: ...  # noqa: D102
    def explain(self, namespace_id: bytes, block_hash: bytes) -> MissReason | None: ...  # noqa: D102
    def pin(self, namespace_id: bytes, block_hash: bytes, ttl_s: float | None) -> bool: ...  # noqa: D102
    def unpin(self, namespace_id: bytes, block_hash: bytes) -> bool: ...  # noqa: D102
    def status(self) -> MetaStatus: ...  # noqa: D102
    def tick(self) -> None: ...  # noqa: D102
    def resumed(self) -> None: ...  # noqa: D102

    def started(self, address: str) -> None:
        """Clients reach the service at ``address``."""

    def stopping(self) -> None:
        """It is about to stop: the streams that end now are not those of lost nodes."""

    def close(self) -> None:
        """It has stopped."""
