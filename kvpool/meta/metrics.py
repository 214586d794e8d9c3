"""What the metadata service shows Prometheus."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpool.core.directory import DISK, SHM, DirectoryStats, LookupStats, TenantStats
from kvpool.core.errors import StateAwayError
from kvpool.core.members import Member, MemberState
from kvpool.meta.serving import Serving
from kvpool.meta.store.base import Store
from kvpool.ops.metrics import Latency
from kvpool.ops.metrics.declared import TIERS
from kvpool.ops.metrics.exposition import Exposition

if TYPE_CHECKING:
    from kvpool.meta.events import EventPublisher

_GAUGES = ("blocks", "namespaces", "surplus_bytes", "leases", "leased_bytes", "reservations", "orders_pending")
_EVENTS = (
    "events_blocks",
    "events_messages",
    "events_dropped",
    "events_lost",
    "events_replays",
    "events_snapshot_parts",
)
_REMOVED = {"evicted": "evicted_blocks", "expired": "expired_blocks", "lost": "lost_blocks", "bad": "bad_blocks"}
_MOVED = {"copied": "copied_blocks", "demoted": "demoted_blocks", "promoted": "promoted_blocks"}


class MetaMetrics:
    """Reads the service's counts when Prometheus asks.

    Args:
        service: Whose.
        requests: How long requests took, by step.
        refusals: Counts of what was refused, by name.
        connections: Open ones.
        unready: Why the service is not ready; empty when it is.
        events: What publishes events, if anything does.
    """

    def __init__(
        self,
        service: Serving,
        requests: Mapping[str, Latency],
        refusals: Callable[[], dict[str, int]],
        connections: Callable[[], int],
        unready: Callable[[], str],
        events: "EventPublisher | None" = None,
    ) -> None:
        self._events = events
        self._service = service
        self._requests = requests
        self._refusals = refusals
        self._connections = connections
        self._unready = unready

    def fill(self, out: Exposition) -> None:
        """Add every metric of the role."""
        out.add("kvpool_ready", not self._unready())
        out.add("kvpool_state_away_total", self._service.away)
        with suppress(StateAwayError):  # then what is known here is all there is
            recovery = self._service.status().recovery
            self._service.ask(lambda directory, members: self._state(out, directory, members))
            out.add("kvpool_recovering", recovery.active)
            out.add("kvpool_recovery_seconds", recovery.lasted_s)
            out.add("kvpool_recovery_reported_nodes", recovery.reported_nodes)
        out.add_latencies("kvpool_meta_request_seconds", self._requests)
        out.add("kvpool_requests_in_progress", self._service.requests.inside)
        out.add("kvpool_connections", self._connections())
        if self._events is not None:
            counts = self._events.counts()
            for name in _EVENTS:
                out.add(f"kvpool_{name}_total", counts[name])
            out.add("kvpool_events_subscribers", counts["events_subscribers"])
            out.add("kvpool_events_lag_seconds", self._events.lag_s)
        refused = self._refusals().items()
        out.add_each("kvpool_refused_total", "what", {name.removeprefix("refused_"): n for name, n in refused})

    def _state(self, out: Exposition, directory: Store, members: Iterable[Member]) -> None:
        """What must be of one moment, so that it adds up."""
        stats = directory.stats()
        self._nodes(out, directory, members)
        _usefulness(out, stats, directory.lookup_stats())
        _fill_level(out, stats)
        _tenants(out, directory.tenants())

    def _nodes(self, out: Exposition, directory: Store, members: Iterable[Member]) -> None:
        states = dict.fromkeys(MemberState, 0)
        for member in members:
            states[member.state] += 1
            out.add("kvpool_node_silence_seconds", self._service.clock() - member.seen_s, node=member.node_id)
        out.add_each("kvpool_nodes", "state", states)
        for segment in directory.segments():
            where = {"node": segment.node_id, "tier": TIERS.get(segment.medium, "other")}
            out.add("kvpool_segment_capacity_bytes", segment.capacity_bytes, **where)
            out.add("kvpool_segment_used_bytes", segment.used_bytes, **where)
            out.add("kvpool_segment_blocks", segment.blocks, **where)


def _usefulness(out: Exposition, stats: DirectoryStats, lookups: LookupStats) -> None:
    out.add("kvpool_lookups_total", stats.lookups)
    out.add("kvpool_lookup_tokens_total", lookups.asked_tokens)
    out.add("kvpool_hit_tokens_total", lookups.matched_tokens)
    out.add_each("kvpool_lookup_misses_total", "reason", lookups.misses)
    out.add("kvpool_matches_shortened_total", stats.matches_shortened)


def _fill_level(out: Exposition, stats: DirectoryStats) -> None:
    for name in _GAUGES:
        out.add(f"kvpool_{name}", getattr(stats, name))
    out.add("kvpool_copies_in_progress", stats.copies)
    out.add("kvpool_evicted_bytes_total", stats.evicted_bytes)
    out.add("kvpool_scattered_blocks_total", stats.scattered_blocks)
    out.add("kvpool_refused_blocks_total", stats.refused_blocks)
    out.add("kvpool_bad_blocks_total", stats.bad_blocks)
    out.add_each("kvpool_removed_blocks_total", "reason", {r: getattr(stats, n) for r, n in _REMOVED.items()})
    out.add_each("kvpool_moved_blocks_total", "way", {way: getattr(stats, n) for way, n in _MOVED.items()})


def _tenants(out: Exposition, tenants: Iterable[TenantStats]) -> None:
    for tenant in tenants:
        of = {"tenant": tenant.name}
        quota_bytes = tenant.limits.bytes
        out.add("kvpool_tenant_used_bytes", tenant.used_bytes, **of, tier=TIERS[SHM])
        out.add("kvpool_tenant_used_bytes", tenant.disk_used_bytes, **of, tier=TIERS[DISK])
        out.add("kvpool_tenant_fair_bytes", tenant.fair_bytes, **of)
        out.add("kvpool_tenant_quota_bytes", math.inf if quota_bytes is None else quota_bytes, **of)
        out.add("kvpool_tenant_pins", tenant.pins, **of)
        for what, count in tenant.refused.items():
            out.add("kvpool_tenant_refused_total", count, **of, what=what)
