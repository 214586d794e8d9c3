"""What the metadata service answers its front doors."""

from dataclasses import dataclass
from typing import Self

from kvpool.core.directory import DirectoryStats, ReserveResult, TenantStats
from kvpool.core.members import MemberSegment, Scrub
from kvpool.core.recovery import Recovery
from kvpool.meta.shared.records import ServerRecord, StateHealth
from kvpool.transport.wire.messages import SegmentGrant, Topology


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation, with a sealed grant for each segment."""

    result: ReserveResult
    grants: list[SegmentGrant]


@dataclass(frozen=True, slots=True)
class RecoveryStatus:
    """How far the directory is rebuilt after the start."""

    active: bool
    reported_nodes: int
    expected_nodes: int
    lasted_s: float

    @classmethod
    def of(cls, recovery: Recovery) -> Self:
        """The state of ``recovery`` now."""
        return cls(recovery.active, recovery.reported_nodes, recovery.expected_nodes, recovery.lasted_s)


@dataclass(frozen=True, slots=True)
class StateStatus:
    """The shared state, and the services that work with it."""

    health: StateHealth
    servers: list[ServerRecord]


@dataclass(frozen=True, slots=True)
class MetaStatus:
    """What operators see of the whole service, at one moment."""

    incarnation: int
    topology: Topology
    stats: DirectoryStats
    used: dict[int, tuple[int, int]]
    """(used bytes, placements) by segment number."""
    scrubs: dict[str, Scrub]
    """By node id."""
    fetched_bytes: dict[str, dict[str, int]]
    """Copied from other nodes, by node id and transport."""
    moved_bytes: dict[str, dict[str, int]]
    """Moved by their data planes, by node id, direction and transport."""
    versions: dict[str, str]
    """Of their software, by node id."""
    off: dict[str, tuple[MemberSegment, ...]]
    """Segments that failed under their nodes, by node id."""
    recovery: RecoveryStatus
    tenants: list[TenantStats]
    uptime_s: float
    """Since the service's start: when all the counts began."""
    state: StateStatus | None = None
    """None where the state is the service's own."""
