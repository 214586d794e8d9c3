"""Turns counts that are kept anyway into what Prometheus scrapes: they are read when it asks, and at no other time."""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TypeVar, assert_never

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from kvpool.ops.metrics.declared import METRICS, Kind, Metric
from kvpool.ops.metrics.latency import BUCKETS_S, Latency
from kvpool.ops.version import __version__

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

Name = TypeVar("Name", bound=str)

_BY_NAME = {metric.name: metric for metric in METRICS}
_LIMITS = [*(str(limit) for limit in BUCKETS_S), "+Inf"]


class Exposition:
    """The values of one scrape, each under a metric that is declared for the role."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._families: dict[str, Family] = {}
        self.add("kvpool_build_info", 1, role=role, version=__version__)

    def add(self, name: str, value: float, **labels: str) -> None:
        """One value of a counter or gauge; all labels that the metric has must be given."""
        metric, family = self._family(name)
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(_values(metric, labels), value)

    def add_each(self, name: str, label: str, values: Mapping[Name, float]) -> None:
        """A value for each value of the metric's one label."""
        for key, value in values.items():
            self.add(name, value, **{label: key})

    def add_latencies(self, name: str, steps: Mapping[str, Latency]) -> None:
        """A histogram for each step."""
        metric, family = self._family(name)
        assert isinstance(family, HistogramMetricFamily)
        for step, latency in steps.items():
            counts, sum_s = latency.snapshot()
            buckets = list(zip(_LIMITS, map(float, accumulate(counts)), strict=True))
            family.add_metric(_values(metric, {"step": step}), buckets, sum_s)

    def families(self) -> Iterable[Family]:
        """What was added."""
        return self._families.values()

    def _family(self, name: str) -> tuple[Metric, Family]:
        metric = _BY_NAME[name]
        assert self._role in metric.roles, f"{name} is not declared for {self._role}"
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = _new_family(metric)
        return metric, found


class RoleCollector(Collector):
    """Asks a role for its values at each scrape.

    Args:
        role: Which metrics are its.
        fill: Adds the values.
    """

    def __init__(self, role: str, fill: Callable[[Exposition], None]) -> None:
        self._role = role
        self._fill = fill

    def describe(self) -> Iterable[Family]:
        """Nothing: names are declared elsewhere, and registering must not ask for values."""
        return ()

    def collect(self) -> Iterable[Family]:
        """The values now."""
        exposition = Exposition(self._role)
        self._fill(exposition)
        return exposition.families()


def new_registry(role: str, fill: Callable[[Exposition], None]) -> CollectorRegistry:
    """A registry of a process's own, with the usual ``process_`` metrics beside the role's."""
    registry = CollectorRegistry()
    registry.register(RoleCollector(role, fill))
    ProcessCollector(registry=registry)
    return registry


def _new_family(metric: Metric) -> Family:
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        case _:
            assert_never(metric.kind)


def _values(metric: Metric, labels: Mapping[str, str]) -> list[str]:
    assert labels.keys() == set(metric.labels), f"{metric.name} has the labels {metric.labels}, not {labels}"
    return [labels[name] for name in metric.labels]
