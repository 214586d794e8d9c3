"""The connector's counts, as vLLM logs and exports them (``vllm:kvpool_*`` in its own ``/metrics``)."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "lookups": "Lookups answered by the pool.",
    "lookup_timeouts": "Lookups given up at their deadline.",
    "lookup_failures": "Lookups that could not be made: the pool is down, or its circuit breaker open.",
    "lookup_tokens": "Tokens asked for.",
    "lookup_hit_tokens": "Of these, tokens that the pool held.",
    "gated_tokens": "Hit tokens not offered, because computing them is faster.",
    "load_tokens": "Tokens loaded.",
    "load_bytes": "Bytes loaded and verified, all ranks.",
    "load_failures": "Loads that brought less than was promised.",
    "save_blocks": "Blocks saved, by all ranks.",
    "save_bytes": "Bytes saved, all ranks.",
    "save_existing_blocks": "Blocks not saved because the pool has them, or another engine is at them.",
    "save_dropped_blocks": "Blocks not saved under pressure, for want of room, or for failures.",
    "save_replans": "Saves planned anew from a missing ancestor.",
    "hook_failures": "Connector hooks that failed and were answered as misses.",
}
HISTOGRAMS = {
    "lookup_seconds": "From a lookup's start to its answer.",
    "load_seconds": "From a load's arrival at a worker to its end.",
    "save_seconds": "From a save's arrival at a worker to its end.",
}
GAUGES = {"pinned_blocks": "Engine blocks that saves in flight hold."}
BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SAMPLES_MAX = 4_096
"""Observations kept between two collections; more are dropped, since nobody collects."""


@dataclass
class KVPoolStats(KVConnectorStats):
    """Counts since the last collection: numbers by counter's name, lists of seconds by histogram's."""

    data: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        self.data[name] = self.data.get(name, 0) + by

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.data[name] = value

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        samples = self.data.setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "KVPoolStats":
        """Add another's counts to these."""
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data[name] = [*self.data.get(name, ()), *value][:SAMPLES_MAX]
            elif name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: counters as they are, means of the histograms in milliseconds."""
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if isinstance(value, list):
                mean = sum(value) / len(value) if value else 0.0
                reduced[name.replace("_seconds", "_avg_ms")] = round(mean * 1e3, 3)
            else:
                reduced[name] = value
        return reduced


class KVPoolPromMetrics(KVConnectorPromMetrics):
    """The same numbers in vLLM's Prometheus registry."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's types
        metric_types: Any,  # noqa: ANN401
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvpool_{name}_total", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: self._histogram_cls(
                name=f"vllm:kvpool_{name}", documentation=text, labelnames=labelnames, buckets=BUCKETS
            )
            for name, text in HISTOGRAMS.items()
        }
        self._gauges = {
            name: self._gauge_cls(name=f"vllm:kvpool_{name}", documentation=text, labelnames=labelnames)
            for name, text in GAUGES.items()
        }
        for labels in per_engine_labelvalues.values():  # shown as 0 before anything happens
            for metric in (*self._counters.values(), *self._histograms.values(), *self._gauges.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one collection of `KVPoolStats.data`."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._gauges:
                self._gauges[name].labels(*labels).set(value)
            elif name in self._histograms:
                for seconds in value:
                    self._histograms[name].labels(*labels).observe(seconds)
