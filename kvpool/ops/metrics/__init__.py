"""Metrics: what is exposed, declared once; dashboards, alert rules and the reference page are generated from it."""

from kvpool.ops.metrics.declared import METRICS, Kind, Metric, Question
from kvpool.ops.metrics.latency import BUCKETS_S, Latency, latencies

__all__ = [
    "BUCKETS_S",
    "METRICS",
    "Kind",
    "Latency",
    "Metric",
    "Question",
    "latencies",
]
