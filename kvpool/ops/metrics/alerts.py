"""What somebody should be woken for, or see the next day; docs/deployment.md says what to do about each."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule.

    Attributes:
        name: Its name, and the heading in the docs.
        expression: PromQL; it fires where this has a value.
        lasting: How long it must have one.
        severity: page: now; ticket: in working hours.
        summary: What it means, in a line.
        advice: What to do.
    """

    name: str
    expression: str
    lasting: str
    severity: Literal["page", "ticket"]
    summary: str
    advice: str


ALERTS = (
    Alert(
        "KvpoolDown", 'up{job=~"kvpool.*"} == 0', "1m", "page",
        "{{ $labels.instance }} does not answer.",
        "Engines go on without it: they compute. Look at its log and restart it; a node finds its blocks again.",
    ),
    Alert(
        "KvpoolNotReady", "kvpool_ready == 0", "5m", "page",
        "{{ $labels.instance }} lives and is not ready.",
        "`/readyz` of that instance says why: recovering, no node, drained, or not taken in by the metadata service.",
    ),
    Alert(
        "KvpoolNodeLost", 'kvpool_nodes{state="lost"} > 0', "2m", "ticket",
        "{{ $value }} nodes are lost.",
        "`kvpool status` names them. Their blocks are misses until they return, and return with them.",
    ),
    Alert(
        "KvpoolRecoveringLong", "kvpool_recovering == 1 and kvpool_recovery_seconds > 120", "1m", "ticket",
        "The directory is not rebuilt two minutes after a start.",
        "Nodes are missing: `expected_nodes` may be too high, or they cannot reach the service.",
    ),
    Alert(
        "KvpoolHitRateCollapsed",
        "sum(rate(kvpool_hit_tokens_total[15m])) / sum(rate(kvpool_lookup_tokens_total[15m])) < 0.5 * "
        "sum(rate(kvpool_hit_tokens_total[1d] offset 1h)) / sum(rate(kvpool_lookup_tokens_total[1d] offset 1h))",
        "15m", "ticket",
        "The hit rate is less than half of yesterday's.",
        "`kvpool explain` says why blocks are missing: another namespace after an upgrade, evictions, lost nodes.",
    ),
    Alert(
        "KvpoolEvictionStorm",
        'sum(increase(kvpool_removed_blocks_total{reason="evicted"}[10m])) > sum(kvpool_blocks)', "10m", "ticket",
        "The pool turns over in less than ten minutes.",
        "It is too small for what is written to it: add nodes or a disk tier, or save less.",
    ),
    Alert(
        "KvpoolNoRoom", "sum(rate(kvpool_refused_blocks_total[5m])) > 0", "10m", "ticket",
        "Blocks are not stored: all that there is is held.",
        "Leases or pins hold the pool: see `kvpool_leased_bytes`; shorten leases, or add nodes.",
    ),
    Alert(
        "KvpoolBadBlocks",
        "sum(increase(kvpool_bad_blocks_total[1h])) + sum(increase(kvpool_store_bad_blocks_total[1h])) > 0",
        "0m", "page",
        "Stored bytes were not what was written. None was served.",
        "`kvpool verify` finds the node; its log names the blocks. Suspect that host's memory.",
    ),
    Alert(
        "KvpoolDiskOff", "kvpool_node_disk_off == 1", "0m", "ticket",
        "A disk tier has failed and is out of use on {{ $labels.instance }}.",
        "Memory serves. See to the disk, and restart the node.",
    ),
    Alert(
        "KvpoolEventsDropped", "sum by (instance) (increase(kvpool_events_dropped_total[10m])) > 0", "30m", "ticket",
        "A subscriber of {{ $labels.instance }} does not keep up with its events.",
        "It catches up by replays and snapshots (`kvpool_events_replays_total`), and is behind meanwhile: look at it.",
    ),
    Alert(
        "KvpoolEventsLost", "increase(kvpool_events_lost_total[1h]) > 0", "0m", "ticket",
        "{{ $labels.instance }} could not publish all its events.",
        "Its processor is too busy. Followers that know of snapshots take one; others miss blocks until they restart.",
    ),
    Alert(
        "KvpoolOverloaded", "sum by (what, instance) (rate(kvpool_refused_total[5m])) > 1", "5m", "ticket",
        "{{ $labels.instance }} refuses {{ $labels.what }}.",
        "docs/design/overload.md lists the limits. Look for one caller among many before raising them.",
    ),
)  # fmt: skip
"""All rules, the gravest of each kind first."""
