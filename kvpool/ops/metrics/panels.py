"""The dashboard: about twenty panels, a row for each question that operators ask."""

from dataclasses import dataclass

from kvpool.ops.metrics.declared import Question

WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and what its lines are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        question: Its row.
        title: What it shows.
        unit: Grafana's name of it.
        queries: What is drawn.
    """

    question: Question
    title: str
    unit: str
    queries: tuple[Query, ...]


def _rate(metric: str, *by: str) -> str:
    grouped = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouped} (rate({metric}[{WINDOW}]))"


def _quantile(part: float, metric: str) -> str:
    return f"histogram_quantile({part}, {_rate(f'{metric}_bucket', 'le', 'step')})"


def _panel(question: Question, title: str, unit: str, *queries: tuple[str, str]) -> Panel:
    return Panel(question, title, unit, tuple(Query(*query) for query in queries))


_UP = (
    _panel(Question.UP, "Nodes by state", "short", ("max by (state) (kvpool_nodes)", "{{state}}")),
    _panel(Question.UP, "Ready", "short", ("kvpool_ready", "{{job}} {{instance}}")),
    _panel(
        Question.UP, "Silence of nodes, and recovery", "s",
        ("kvpool_node_silence_seconds", "{{node}}"),
        ("kvpool_recovery_seconds * kvpool_recovering", "recovering"),
    ),
)  # fmt: skip

_HELPING = (
    _panel(
        Question.HELPING, "Hit rate: tokens found of tokens asked for", "percentunit",
        (f"{_rate('kvpool_hit_tokens_total')} / {_rate('kvpool_lookup_tokens_total')}", "hit rate"),
    ),
    _panel(
        Question.HELPING, "Tokens a second", "short",
        (_rate("kvpool_lookup_tokens_total"), "asked"), (_rate("kvpool_hit_tokens_total"), "found"),
    ),
    _panel(
        Question.HELPING, "Why look-ups ended early", "ops",
        (_rate("kvpool_lookup_misses_total", "reason"), "{{reason}}"),
    ),
    _panel(
        Question.HELPING, "Bytes that clients moved", "Bps",
        (_rate("kvpool_client_bytes_total", "direction", "transport"), "{{direction}} {{transport}}"),
    ),
)  # fmt: skip

_FULL = (
    _panel(
        Question.FULL, "Used, of what a tier can hold", "percentunit",
        ("sum by (tier) (kvpool_segment_used_bytes) / sum by (tier) (kvpool_segment_capacity_bytes)", "{{tier}}"),
    ),
    _panel(
        Question.FULL, "Used by node", "bytes",
        ("max by (node, tier) (kvpool_segment_used_bytes)", "{{node}} {{tier}}"),
    ),
    _panel(
        Question.FULL, "Blocks that left", "ops",
        (_rate("kvpool_removed_blocks_total", "reason"), "{{reason}}"),
        (_rate("kvpool_refused_blocks_total"), "refused"),
    ),
    _panel(
        Question.FULL, "Held by leases", "bytes",
        ("max(kvpool_leased_bytes)", "leased"), ("max(kvpool_surplus_bytes)", "further copies"),
    ),
    _panel(
        Question.FULL, "Used by tenant, of what its share comes to", "percentunit",
        ('kvpool_tenant_used_bytes{tier="memory"} / ignoring (tier) kvpool_tenant_fair_bytes', "{{tenant}}"),
    ),
    _panel(
        Question.FULL, "Refused over a tenant's limits", "ops",
        (_rate("kvpool_tenant_refused_total", "tenant", "what"), "{{tenant}} {{what}}"),
    ),
    _panel(
        Question.FULL, "Fragmentation: free memory that is not in the longest piece", "percentunit",
        (
            '1 - kvpool_store_largest_free_bytes / ignoring (state) kvpool_store_bytes{state="free"}',
            "{{instance}} {{tier}}",
        ),
    ),
    _panel(
        Question.FULL, "Copied between nodes and tiers", "ops",
        (_rate("kvpool_moved_blocks_total", "way"), "{{way}}"),
    ),
)  # fmt: skip

_SLOW = (
    _panel(
        Question.SLOW, "Metadata service: time to answer, p99", "s",
        (_quantile(0.99, "kvpool_meta_request_seconds"), "{{step}}"),
    ),
    _panel(
        Question.SLOW, "Metadata service: requests a second", "ops",
        (_rate("kvpool_meta_request_seconds_count", "step"), "{{step}}"),
    ),
    _panel(
        Question.SLOW, "Nodes: time to serve, p99", "s", (_quantile(0.99, "kvpool_node_request_seconds"), "{{step}}")
    ),
    _panel(
        Question.SLOW, "Nodes: bytes through their connections", "Bps",
        (_rate("kvpool_node_bytes_total", "direction", "transport"), "{{direction}} {{transport}}"),
    ),
    _panel(
        Question.SLOW, "Clients: time of each step, p99", "s", (_quantile(0.99, "kvpool_client_seconds"), "{{step}}")
    ),
    _panel(
        Question.SLOW, "Queues", "short",
        ("sum(kvpool_requests_in_progress)", "requests"), ("sum(kvpool_orders_pending)", "orders"),
        ("sum(kvpool_copies_in_progress)", "copies"),
    ),
    _panel(
        Question.SLOW, "Refused, retried", "ops",
        (_rate("kvpool_refused_total", "what"), "refused {{what}}"), (_rate("kvpool_client_retries_total"), "retries"),
    ),
    _panel(
        Question.SLOW, "Events", "ops",
        (_rate("kvpool_events_messages_total"), "messages"), (_rate("kvpool_events_dropped_total"), "drops"),
        (_rate("kvpool_events_replays_total"), "replays"),
        (_rate("kvpool_events_snapshot_parts_total"), "parts of snapshots"),
    ),
)  # fmt: skip

_RIGHT = (
    _panel(
        Question.RIGHT, "Bad blocks", "short",
        ("sum(kvpool_bad_blocks_total)", "dropped by the directory"),
        ("sum(kvpool_store_bad_blocks_total)", "found by nodes"),
        ("sum(kvpool_client_verify_failures_total)", "met by clients"),
    ),
    _panel(
        Question.RIGHT, "Checked by nodes", "Bps", (_rate("kvpool_store_checked_bytes_total", "tier"), "{{tier}}")
    ),
    _panel(
        Question.RIGHT, "Writes that failed", "ops",
        (_rate("kvpool_store_failed_writes_total", "reason"), "{{reason}}"),
        (_rate("kvpool_client_refused_blocks_total"), "refused to clients"),
    ),
)  # fmt: skip

PANELS = (*_UP, *_HELPING, *_FULL, *_SLOW, *_RIGHT)
"""All panels, in the order of the questions."""
