"""What a client shows Prometheus, in the registry of the program that it lives in."""

from typing import TYPE_CHECKING

from kvpool.core.directory import MissReason
from kvpool.ops.metrics.declared import CLIENT
from kvpool.ops.metrics.exposition import Exposition, RoleCollector

if TYPE_CHECKING:
    from kvpool.client.client import Client


def collector_of(client: "Client") -> RoleCollector:
    """Reads the client's counts at each scrape."""
    return RoleCollector(CLIENT, lambda out: _fill(out, client))


def _fill(out: Exposition, client: "Client") -> None:
    stats = client.stats()
    for direction, by_transport in (("in", stats.loaded_bytes), ("out", stats.stored_bytes)):
        for transport, size_bytes in by_transport.items():
            out.add("kvpool_client_bytes_total", size_bytes, direction=direction, transport=transport)
    out.add_each("kvpool_client_misses_total", "reason", {why: stats.misses.get(why, 0) for why in MissReason})
    out.add_latencies("kvpool_client_seconds", client._counters.times)
    out.add("kvpool_client_retries_total", stats.retries)
    out.add("kvpool_client_retries_denied_total", stats.retries_denied)
    out.add("kvpool_client_overloaded_total", stats.overloaded)
    out.add("kvpool_client_reconnects_total", stats.reconnects)
    out.add("kvpool_client_fallbacks", stats.fallbacks)
    out.add("kvpool_client_verify_failures_total", stats.verify_failures)
    out.add("kvpool_client_refused_blocks_total", stats.stores_refused)
