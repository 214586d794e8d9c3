"""Every metric: its name, kind, labels, who exposes it, and which question of an operator it answers.

The reference page, the dashboards and the alert rules are generated from here. Names end in their unit; there are no
rates: PromQL makes those. Labels take values of small closed sets, or name nodes or tenants, of which a pool
has limits.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvpool.core.directory import DISK, SHM, VRAM

TIERS = {SHM: "memory", VRAM: "vram", DISK: "disk"}
"""The label ``tier``, by the medium of a segment."""

META, NODE, CLIENT = "meta", "node", "client"
SERVERS = (META, NODE)


class Kind(StrEnum):
    """What a metric's values mean."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Question(StrEnum):
    """What operators ask; a dashboard has a row for each."""

    UP = "Is it up?"
    HELPING = "Is it helping?"
    FULL = "Is it full?"
    SLOW = "Is it slow?"
    RIGHT = "Are the bytes right?"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: As Prometheus stores it; a histogram's gets ``_bucket``, ``_sum`` and ``_count`` behind it.
        kind: See `Kind`.
        question: What it helps to answer.
        help: What it counts, in a line.
        roles: Who exposes it.
        labels: Names of its labels.
    """

    name: str
    kind: Kind
    question: Question
    help: str
    roles: tuple[str, ...]
    labels: tuple[str, ...] = ()


def _counter(question: Question, role: str, name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, question, text, (role,), labels)


def _gauge(question: Question, role: str, name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, question, text, (role,), labels)


def _histogram(question: Question, role: str, name: str, text: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, question, text, (role,), ("step",))


_UP = (
    Metric(
        "kvpool_build_info", Kind.GAUGE, Question.UP, "1, with the software's version.", (META, NODE, CLIENT),
        ("role", "version"),
    ),
    Metric("kvpool_ready", Kind.GAUGE, Question.UP, "Whether /readyz says yes: 1 or 0.", SERVERS),
    _gauge(Question.UP, META, "kvpool_nodes", "Nodes by state: joining, ready, draining, lost.", "state"),
    _gauge(Question.UP, META, "kvpool_node_silence_seconds", "Time since a node was last heard of.", "node"),
    _counter(Question.UP, META, "kvpool_state_away_total", "Calls that found the state in Redis away: misses."),
    _gauge(Question.UP, META, "kvpool_recovering", "1 while nodes have yet to report after a start, else 0."),
    _gauge(Question.UP, META, "kvpool_recovery_seconds", "How long the recovery after the start took, or takes."),
    _gauge(Question.UP, META, "kvpool_recovery_reported_nodes", "Nodes here whose inventories are complete."),
    _gauge(Question.UP, NODE, "kvpool_node_joined", "1 while the metadata service counts the node in, else 0."),
    _gauge(Question.UP, NODE, "kvpool_node_draining", "1 while the node takes no new blocks, else 0."),
    _gauge(Question.UP, NODE, "kvpool_node_disk_off", "1 when the node's disk has failed and is out of use, else 0."),
)  # fmt: skip

_HELPING = (
    _counter(Question.HELPING, META, "kvpool_lookups_total", "Look-ups of chains."),
    _counter(Question.HELPING, META, "kvpool_lookup_tokens_total", "Tokens that look-ups asked for."),
    _counter(Question.HELPING, META, "kvpool_hit_tokens_total", "Of these, tokens that the pool held."),
    _counter(
        Question.HELPING, META, "kvpool_lookup_misses_total",
        "Look-ups that ended before their chain did, by the reason of the first missing block.", "reason",
    ),
    _counter(
        Question.HELPING, META, "kvpool_matches_shortened_total",
        "Matches cut short because leases hold as much of the pool as they may.",
    ),
    _counter(
        Question.HELPING, CLIENT, "kvpool_client_bytes_total",
        "Verified bytes loaded (in) and committed bytes stored (out).", "direction", "transport",
    ),
    _counter(Question.HELPING, CLIENT, "kvpool_client_misses_total", "Blocks not loaded.", "reason"),
)  # fmt: skip

_FULL = (
    _gauge(Question.FULL, META, "kvpool_blocks", "Blocks in the directory, however many copies they have."),
    _gauge(Question.FULL, META, "kvpool_namespaces", "Namespaces open."),
    _gauge(Question.FULL, META, "kvpool_segment_capacity_bytes", "What a node's tier can hold.", "node", "tier"),
    _gauge(Question.FULL, META, "kvpool_segment_used_bytes", "What is placed there.", "node", "tier"),
    _gauge(Question.FULL, META, "kvpool_segment_blocks", "Copies of blocks placed there.", "node", "tier"),
    _gauge(Question.FULL, META, "kvpool_surplus_bytes", "Further copies of blocks; they go first."),
    _counter(
        Question.FULL, META, "kvpool_removed_blocks_total",
        "Blocks that left the directory: evicted, expired (not written in time), lost (with a node), bad.", "reason",
    ),
    _counter(Question.FULL, META, "kvpool_evicted_bytes_total", "Bytes of evicted blocks."),
    _counter(
        Question.FULL, META, "kvpool_scattered_blocks_total",
        "Evicted blocks whose node had enough room, but not in one piece.",
    ),
    _counter(Question.FULL, META, "kvpool_refused_blocks_total", "Blocks that found no room: all of it was held."),
    _counter(
        Question.FULL, META, "kvpool_moved_blocks_total",
        "Blocks copied between nodes and tiers: all copied, of them demoted to and promoted from disks.", "way",
    ),
    _gauge(
        Question.FULL, META, "kvpool_tenant_used_bytes", "Memory and disk that a tenant's blocks take.",
        "tenant", "tier",
    ),
    _gauge(Question.FULL, META, "kvpool_tenant_fair_bytes", "Memory that a tenant's share comes to.", "tenant"),
    _gauge(
        Question.FULL, META, "kvpool_tenant_quota_bytes", "Memory that a tenant may take; +Inf: no limit.", "tenant",
    ),
    _gauge(Question.FULL, META, "kvpool_tenant_pins", "Blocks of a tenant that are pinned.", "tenant"),
    _counter(
        Question.FULL, META, "kvpool_tenant_refused_total",
        "Refused over a tenant's limits: blocks over its bytes and its writes, pins, lookups.", "tenant", "what",
    ),
    _gauge(Question.FULL, META, "kvpool_leases", "Leases that readers hold."),
    _gauge(Question.FULL, META, "kvpool_leased_bytes", "Bytes that leases keep from eviction."),
    _gauge(Question.FULL, META, "kvpool_reservations", "Writes begun and not ended."),
    _gauge(Question.FULL, NODE, "kvpool_store_capacity_bytes", "Size of a segment.", "tier"),
    _gauge(
        Question.FULL, NODE, "kvpool_store_bytes",
        "Bytes of a segment by state: blocks, resting (before they are used again), retired (bad memory), free.",
        "tier", "state",
    ),
    _gauge(
        Question.FULL, NODE, "kvpool_store_largest_free_bytes",
        "Longest free extent: far below what is free, the memory is fragmented.", "tier",
    ),
    _counter(Question.FULL, NODE, "kvpool_store_no_slot_total", "Granted blocks that found no extent.", "tier"),
)  # fmt: skip

_SLOW = (
    _histogram(Question.SLOW, META, "kvpool_meta_request_seconds", "Time to answer a request of the framed protocol."),
    _gauge(Question.SLOW, META, "kvpool_requests_in_progress", "Look-ups and reservations at work or waiting."),
    _gauge(Question.SLOW, META, "kvpool_orders_pending", "Orders that nodes have not acknowledged."),
    _gauge(Question.SLOW, META, "kvpool_copies_in_progress", "Copies between nodes under way."),
    Metric("kvpool_connections", Kind.GAUGE, Question.SLOW, "Connections of the framed protocol open.", SERVERS),
    Metric(
        "kvpool_refused_total", Kind.COUNTER, Question.SLOW, "Refused over a limit; see docs/design/overload.md.",
        SERVERS, ("what",),
    ),
    _histogram(
        Question.SLOW, NODE, "kvpool_node_request_seconds",
        "Time to serve a request of the data plane; verify: to check a stored block.",
    ),
    _counter(
        Question.SLOW, NODE, "kvpool_node_bytes_total",
        "Block bytes through the node's own connections; shm and ucx move bytes past them, and clients count those.",
        "direction", "transport",
    ),
    _histogram(Question.SLOW, CLIENT, "kvpool_client_seconds", "Time of each step of the client's calls."),
    _counter(Question.SLOW, META, "kvpool_events_blocks_total", "Blocks that events said to have come or gone."),
    _counter(Question.SLOW, META, "kvpool_events_messages_total", "Messages of events published."),
    _counter(
        Question.SLOW, META, "kvpool_events_dropped_total",
        "Times that a subscriber, or who asked for a replay, had no room for a message and began to miss some.",
    ),
    _counter(
        Question.SLOW, META, "kvpool_events_lost_total",
        "Changes never published: they came faster than they could be; followers take a snapshot.",
    ),
    _counter(Question.SLOW, META, "kvpool_events_replays_total", "Replays asked for."),
    _counter(Question.SLOW, META, "kvpool_events_snapshot_parts_total", "Parts of snapshots asked for."),
    _gauge(Question.SLOW, META, "kvpool_events_subscribers", "Connections to the event stream."),
    _gauge(
        Question.SLOW, META, "kvpool_events_lag_seconds", "How long the oldest change of the last message had waited."
    ),
    _counter(Question.SLOW, CLIENT, "kvpool_client_retries_total", "Calls made once more."),
    _counter(Question.SLOW, CLIENT, "kvpool_client_retries_denied_total", "Not made again: the budget was spent."),
    _counter(Question.SLOW, CLIENT, "kvpool_client_overloaded_total", "Calls that the metadata service refused."),
    _counter(Question.SLOW, CLIENT, "kvpool_client_reconnects_total", "Times the metadata service was found anew."),
    _gauge(
        Question.SLOW, CLIENT, "kvpool_client_fallbacks",
        "Transports in use that run over something slower than they are meant for.",
    ),
)  # fmt: skip

_RIGHT = (
    _counter(
        Question.RIGHT, META, "kvpool_bad_blocks_total", "Copies dropped because a reader or a scrub found them bad."
    ),
    _counter(Question.RIGHT, NODE, "kvpool_store_committed_total", "Blocks written and taken in.", "tier"),
    _counter(
        Question.RIGHT, NODE, "kvpool_store_failed_writes_total",
        "Writes not taken in: bad (other bytes arrived than were sent), expired, unanswered (by the directory).",
        "tier", "reason",
    ),
    _counter(Question.RIGHT, NODE, "kvpool_store_checked_bytes_total", "Bytes compared with checksums.", "tier"),
    _counter(Question.RIGHT, NODE, "kvpool_store_bad_blocks_total", "Of the blocks compared, bad ones.", "tier"),
    _counter(Question.RIGHT, NODE, "kvpool_scrub_passes_total", "Scrubs of all that the node holds that have ended."),
    _counter(
        Question.RIGHT, CLIENT, "kvpool_client_verify_failures_total",
        "Blocks that arrived with wrong bytes, and were not served.",
    ),
    _counter(
        Question.RIGHT, CLIENT, "kvpool_client_refused_blocks_total",
        "Blocks not stored: no room, or lost on the way.",
    ),
)  # fmt: skip

METRICS = (*_UP, *_HELPING, *_FULL, *_SLOW, *_RIGHT)
"""All metrics, in the order of the questions. There is none for unverified reads: there are no such reads."""
