"""What the metadata service answers its front doors."""

from dataclasses import dataclass

from kvpool.core.directory import DirectoryStats, ReserveResult
from kvpool.core.members import Scrub
from kvpool.core.namespace import Namespace
from kvpool.transport.wire.messages import SegmentGrant, Topology


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
    scrubs: dict[str, Scrub]
    """By node id."""
