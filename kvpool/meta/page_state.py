"""What the page of the metadata service shows, as one record: counters, which the page makes rates of, and lists."""

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from kvpool.core.clock import Clock
from kvpool.core.directory import Directory, HeadView, HotHead, MissReason, MissView, NamespaceUsage
from kvpool.core.members import Members
from kvpool.meta.looking import namespace_usage
from kvpool.meta.results import MetaStatus
from kvpool.meta.service import MetaService

FRESH_S = 1.0
"""One record answers everybody who asks within this time: lookers-on cost the directory the same however many."""

HEADS_MAX = 8
NAMESPACES_MAX = 100
TENANTS_MAX = 50
NAME_CHARS_MAX = 200
HASH_DIGITS = 16
"""Of a block's hash: enough to tell blocks apart, not to ask for one."""


class PageState:
    """The record, encoded, and made anew when it is old. Thread-safe.

    Args:
        service: Whose.
        about: What does not change: version and security.
        clock: Monotonic seconds.
    """

    def __init__(self, service: MetaService, about: dict[str, str], clock: Clock) -> None:
        self._service = service
        self._about = about
        self._clock = clock
        self._lock = threading.Lock()
        self._made_s = -FRESH_S
        self._encoded = b""

    def encoded(self) -> bytes:
        """The record as JSON, at most `FRESH_S` old."""
        with self._lock:
            if not self._encoded or self._clock() - self._made_s >= FRESH_S:
                self._encoded = msgspec.json.encode(self._about | page_record(self._service))
                self._made_s = self._clock()
            return self._encoded


def page_record(service: MetaService) -> dict[str, Any]:
    """The record now; holds the directory for a bounded time, and not while it counts what is hot."""
    status = service.status()
    demand = service.ask(lambda directory, _: directory.demand())
    heads = demand.heads(HEADS_MAX)
    seen, latest, misses = service.ask(partial(_ask, heads))
    usage = namespace_usage(service)
    return {
        "incarnation": f"{status.incarnation:x}",
        "uptime_s": status.uptime_s,
        "recovery": status.recovery,
        "counters": status.stats,
        "misses": misses,
        "nodes": list(_nodes(status)),
        "namespaces": [_namespace(usage) for usage in _largest(usage, NAMESPACES_MAX)],
        "namespaces_total": len(usage),
        "tenants": _tenants(usage),
        "traffic": _sums(usage),
        "heads": [_head(head) for head in seen if head is not None],
        "latest_misses": [_miss(miss) for miss in latest],
    }


def _ask(
    heads: list[HotHead], directory: Directory, _: Members
) -> tuple[list[HeadView | None], list[MissView], dict[MissReason, int]]:
    view = directory.view
    return [view.head(head) for head in heads], view.misses(), directory.misses()


def _nodes(status: MetaStatus) -> Iterable[dict[str, Any]]:
    for node in status.topology.nodes:
        used = (status.used.get(segment.number, (0, 0)) for segment in node.segments)
        tiers = [
            {"medium": s.medium, "capacity_bytes": s.capacity_bytes, "used_bytes": size, "blocks": blocks, "off": ""}
            for s, (size, blocks) in zip(node.segments, used, strict=True)
        ]
        tiers += [
            {"medium": s.medium, "capacity_bytes": s.capacity_bytes, "used_bytes": 0, "blocks": 0, "off": s.off}
            for s in status.off.get(node.node_id, ())
        ]
        yield {
            "node_id": node.node_id,
            "state": node.state,
            "version": status.versions.get(node.node_id, ""),
            "tiers": tiers,
            "moved_bytes": status.moved_bytes.get(node.node_id, {}),
            "fetched_bytes": status.fetched_bytes.get(node.node_id, {}),
            "bad_blocks": status.scrubs[node.node_id].bad_blocks if node.node_id in status.scrubs else 0,
        }


def _largest(usage: Iterable[NamespaceUsage], most: int) -> list[NamespaceUsage]:
    return sorted(usage, key=lambda one: one.size_bytes, reverse=True)[:most]


def _namespace(usage: NamespaceUsage) -> dict[str, Any]:
    namespace = usage.namespace
    return {
        "namespace": namespace.id.hex()[:HASH_DIGITS],
        "model": namespace.model[:NAME_CHARS_MAX],
        "tenant": namespace.tenant[:NAME_CHARS_MAX],
        "kv_dtype": namespace.kv_dtype[:NAME_CHARS_MAX],
        "block_bytes": namespace.block_bytes * namespace.shards,
        **_sums([usage]),
    }


def _tenants(usage: Iterable[NamespaceUsage]) -> list[dict[str, Any]]:
    by_tenant: dict[str, list[NamespaceUsage]] = {}
    for one in usage:
        by_tenant.setdefault(one.namespace.tenant, []).append(one)
    sums = [(tenant, _sums(theirs)) for tenant, theirs in by_tenant.items()]
    largest = sorted(sums, key=lambda row: row[1]["size_bytes"], reverse=True)[:TENANTS_MAX]
    return [{"tenant": tenant[:NAME_CHARS_MAX], **theirs} for tenant, theirs in largest]


def _sums(usage: Iterable[NamespaceUsage]) -> dict[str, int]:
    theirs = list(usage)
    names = ("blocks", "size_bytes", "asked_blocks", "matched_blocks", "read_bytes", "stored_bytes")
    return {"namespaces": len(theirs)} | {name: sum(getattr(one, name) for one in theirs) for name in names}


def _head(head: HeadView) -> dict[str, Any]:
    return {
        "namespace": head.namespace.id.hex()[:HASH_DIGITS],
        "model": head.namespace.model[:NAME_CHARS_MAX],
        "first": head.first.hex()[:HASH_DIGITS],
        "blocks": head.blocks,
        "tokens": head.blocks * head.namespace.block_tokens,
        "size_bytes": head.blocks * head.namespace.block_bytes * head.namespace.shards,
        "reads_per_s": head.reads_per_s,
        "branches": head.branches,
        "nodes": head.nodes,
    }


def _miss(miss: MissView) -> dict[str, Any]:
    return {
        "namespace": miss.namespace.id.hex()[:HASH_DIGITS],
        "model": miss.namespace.model[:NAME_CHARS_MAX],
        "missing": miss.missing.hex()[:HASH_DIGITS],
        "reason": miss.reason,
        "matched": miss.matched,
        "asked": miss.asked,
        "ago_s": miss.ago_s,
    }
