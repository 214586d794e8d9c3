"""Rates of a pool: differences of the counters that its metadata service shows, over its own clock."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.client import NamespaceStatus, PoolStatus


@dataclass(frozen=True, slots=True)
class NamespaceRates:
    """What happens in one namespace; ``hit_rate`` is None when nothing was asked."""

    namespace: str
    hit_rate: float | None
    asked_blocks_per_s: float
    read_bytes_per_s: float
    stored_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What happens in a pool.

    Attributes:
        interval_s: Over which time; for the first look at a pool, since its service started.
        hit_rate: Of the blocks that look-ups asked for, those that were there; None when nothing was asked.
        lookups_per_s: Calls of `match`.
        read_bytes_per_s: Bytes that readers were told where to find.
        stored_bytes_per_s: Bytes that writers committed.
        evicted_blocks_per_s: Blocks that made room for others.
        refused_per_s: Calls, connections and blocks refused for want of capacity.
        misses_per_s: Look-ups that ended early, by reason; reasons that did not occur are left out.
        moved_bytes_per_s: Bytes through the nodes' sockets: "out tcp", "in unix" and so on.
        copied_bytes_per_s: Bytes copied from node to node, by transport.
        nodes: `moved_bytes_per_s` by node id.
        namespaces: Each namespace, by id.
    """

    interval_s: float
    hit_rate: float | None
    lookups_per_s: float
    read_bytes_per_s: float
    stored_bytes_per_s: float
    evicted_blocks_per_s: float
    refused_per_s: float
    misses_per_s: dict[str, float]
    moved_bytes_per_s: dict[str, float]
    copied_bytes_per_s: dict[str, float]
    nodes: dict[str, dict[str, float]]
    namespaces: dict[str, NamespaceRates]


_REFUSED = ("refused_requests", "refused_nodes", "refused_calls", "refused_connections", "refused_blocks")


def rates_between(before: "PoolStatus | None", now: "PoolStatus") -> Rates:
    """Rates from ``before`` to ``now``; since the service's start without ``before``, or after a restart."""
    if before is None or before.incarnation != now.incarnation or before.uptime_s >= now.uptime_s:
        before = None
    interval_s = max(now.uptime_s - (before.uptime_s if before else 0.0), 1e-6)
    old_usage = {usage.namespace: usage for usage in before.usage} if before else {}
    namespaces = {u.namespace: _namespace_rates(old_usage.get(u.namespace), u, interval_s) for u in now.usage}
    old_counters = before.counters if before else {}
    counts = {name: _grown(old_counters.get(name, 0), count) for name, count in now.counters.items()}
    old_nodes = {node.node_id: node for node in before.nodes} if before else {}
    moved, copied = {}, Counter[str]()
    for node in now.nodes:
        old = old_nodes.get(node.node_id)
        moved[node.node_id] = _per_s(old.moved_bytes if old else {}, node.moved_bytes, interval_s)
        copied.update(_per_s(old.fetched_bytes if old else {}, node.fetched_bytes, interval_s))
    total: Counter[str] = Counter()
    for ways in moved.values():
        total.update(ways)
    return Rates(
        interval_s=interval_s,
        hit_rate=_share(counts.get("blocks_matched", 0), counts.get("blocks_asked", 0)),
        lookups_per_s=counts.get("lookups", 0) / interval_s,
        read_bytes_per_s=sum(rates.read_bytes_per_s for rates in namespaces.values()),
        stored_bytes_per_s=sum(rates.stored_bytes_per_s for rates in namespaces.values()),
        evicted_blocks_per_s=counts.get("evicted_blocks", 0) / interval_s,
        refused_per_s=sum(counts.get(name, 0) for name in _REFUSED) / interval_s,
        misses_per_s=_per_s(before.misses if before else {}, now.misses, interval_s),
        moved_bytes_per_s=dict(total),
        copied_bytes_per_s=dict(copied),
        nodes=moved,
        namespaces=namespaces,
    )


def _namespace_rates(old: "NamespaceStatus | None", now: "NamespaceStatus", interval_s: float) -> NamespaceRates:
    asked = now.asked_blocks - (old.asked_blocks if old else 0)
    matched = now.matched_blocks - (old.matched_blocks if old else 0)
    return NamespaceRates(
        namespace=now.namespace,
        hit_rate=_share(matched, asked),
        asked_blocks_per_s=asked / interval_s,
        read_bytes_per_s=(now.read_bytes - (old.read_bytes if old else 0)) / interval_s,
        stored_bytes_per_s=(now.stored_bytes - (old.stored_bytes if old else 0)) / interval_s,
    )


def _per_s(old: Mapping[str, int], now: Mapping[str, int], interval_s: float) -> dict[str, float]:
    grown = {name: _grown(old.get(name, 0), count) for name, count in now.items()}
    return {name: count / interval_s for name, count in grown.items() if count}


def _grown(old: int, now: int) -> int:
    """By how much; a count that fell began anew, as a node's does with its process."""
    return now - old if now >= old else now


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
