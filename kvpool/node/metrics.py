"""What a store node shows Prometheus."""

from collections.abc import Callable

from kvpool.node.meter import NodeMeter
from kvpool.node.records import StoreStats
from kvpool.node.scrub import Scrubber, whole_progress
from kvpool.node.store import NodeStore
from kvpool.ops.metrics.declared import TIERS
from kvpool.ops.metrics.exposition import Exposition

FAILED_WRITES = {"bad": "bad_writes", "expired": "expired_writes", "unanswered": "commits_failed"}


class NodeMetrics:
    """Reads the node's counts when Prometheus asks.

    Args:
        store: Its memory, with the disk's beside it.
        meter: What the data plane counts.
        scrubbers: Of each tier.
        refusals: Counts of what was refused, by name.
        connections: Open ones of the data plane.
        joined: Whether the metadata service counts the node in.
        unready: Why the node is not ready; empty when it is.
    """

    def __init__(
        self,
        store: NodeStore,
        meter: NodeMeter,
        scrubbers: list[Scrubber],
        refusals: Callable[[], dict[str, int]],
        connections: Callable[[], int],
        joined: Callable[[], bool],
        unready: Callable[[], str],
    ) -> None:
        self._store = store
        self._meter = meter
        self._scrubbers = scrubbers
        self._refusals = refusals
        self._connections = connections
        self._joined = joined
        self._unready = unready

    def fill(self, out: Exposition) -> None:
        """Add every metric of the role."""
        store = self._store
        out.add("kvpool_ready", not self._unready())
        out.add("kvpool_node_joined", self._joined())
        out.add("kvpool_node_draining", store.draining)
        out.add("kvpool_node_disk_off", any(tier.off for tier in store.tiers))
        for tier in store.tiers:
            _tier(out, tier, TIERS[tier.segment.medium])
        out.add("kvpool_scrub_passes_total", whole_progress(self._scrubbers).passes)
        out.add("kvpool_connections", self._connections())
        refused = self._refusals().items()
        out.add_each("kvpool_refused_total", "what", {name.removeprefix("refused_"): n for name, n in refused})
        verify = store.checks.time  # of memory: a disk's checks wait for it
        out.add_latencies("kvpool_node_request_seconds", self._meter.times | {"verify": verify})
        for (direction, transport), size_bytes in self._meter.moved_bytes().items():
            out.add("kvpool_node_bytes_total", size_bytes, direction=direction, transport=transport)


def _states(stats: StoreStats) -> dict[str, int]:
    """Bytes of a segment by state, which add up to its capacity."""
    return {
        "blocks": stats.used_bytes - stats.quarantined_bytes,
        "resting": stats.quarantined_bytes - stats.retired_bytes,
        "retired": stats.retired_bytes,
        "free": stats.capacity_bytes - stats.used_bytes,
    }


def _tier(out: Exposition, store: NodeStore, tier: str) -> None:
    stats = store.stats()
    counts = stats.counters
    out.add("kvpool_store_capacity_bytes", stats.capacity_bytes, tier=tier)
    for state, size_bytes in _states(stats).items():
        out.add("kvpool_store_bytes", size_bytes, tier=tier, state=state)
    out.add("kvpool_store_largest_free_bytes", stats.largest_free_bytes, tier=tier)
    out.add("kvpool_store_no_slot_total", counts.get("no_slot", 0), tier=tier)
    out.add("kvpool_store_committed_total", counts.get("committed", 0), tier=tier)
    for reason, name in FAILED_WRITES.items():
        out.add("kvpool_store_failed_writes_total", counts.get(name, 0), tier=tier, reason=reason)
    out.add("kvpool_store_checked_bytes_total", counts.get("checked_bytes", 0), tier=tier)
    out.add("kvpool_store_bad_blocks_total", counts.get("bad_blocks", 0), tier=tier)
