"""Metrics: what is declared is exposed, what is exposed is declared, and what is generated is up to date."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvpool
from kvpool.embedded import EmbeddedPool
from kvpool.meta import framed as meta_framed
from kvpool.meta.framed import MetaSession
from kvpool.meta.service import MetaService
from kvpool.node import meter as node_meter
from kvpool.node.serving import DataSession
from kvpool.ops.metrics import BUCKETS_S, METRICS, Kind, Latency
from kvpool.ops.metrics.alerts import ALERTS
from kvpool.ops.metrics.exposition import Exposition
from kvpool.ops.metrics.generate import generated, series_of
from kvpool.ops.metrics.panels import PANELS
from kvpool.ops.settings import MetaSettings, NodeSettings
from tests.http_pages import ask

ROOT = Path(__file__).parents[2]
SERIES = {series: metric for metric in METRICS for series in series_of(metric)}
PROMETHEUS_LABELS = {"le", "job", "instance"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)
EXPRESSIONS = [query.expression for panel in PANELS for query in panel.queries] + [a.expression for a in ALERTS]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """What each role exposes, with a disk, and after a store and a load, so that every metric has a value."""
    folder = tmp_path_factory.mktemp("pool")
    node = NodeSettings(
        node_id="n0", size="4MiB", data_port=0, grpc_port=0, segment_dir=folder, unix_socket=folder / "n0.sock",
        keep_segment=False, disk=folder, disk_size="4MiB",
    )  # fmt: skip
    with EmbeddedPool(MetaSettings(grpc_port=0, framed_port=0, events_port=0), node) as pool, pool.connect() as client:
        blocks = client.namespace(kvpool.Namespace(model="m", block_tokens=16, block_bytes=4096))
        content = np.ones((1, 4096), np.uint8)
        blocks.store([bytes(32)], content)
        assert blocks.load([bytes(32)], np.zeros_like(content)).loaded == 1
        registry = CollectorRegistry()
        registry.register(client.collector())
        addresses = {"meta": pool.meta.http_address, "node": pool.nodes[0].http_address}
        texts = {role: ask(address, "/metrics").text for role, address in addresses.items()}
        yield texts | {"client": generate_latest(registry).decode()}


@pytest.fixture(scope="module")
def pages(texts):
    return {role: families(text) for role, text in texts.items()}


def families(text):
    return [family for family in text_string_to_metric_families(text) if family.name.startswith("kvpool_")]


def exposed(page):
    """Kind and labels by the name that Prometheus stores."""
    return {sample.name: (family.type, set(sample.labels) - {"le"}) for family in page for sample in family.samples}


@pytest.mark.parametrize("role", ["meta", "node", "client"])
def test_a_service_exposes_what_is_declared_of_it_and_nothing_else(pages, role):
    declared = {series: (metric.kind, set(metric.labels)) for series, metric in SERIES.items() if role in metric.roles}

    assert declared == exposed(pages[role])


@pytest.mark.parametrize("role", ["meta", "node", "client"])
def test_help_comes_with_each_metric(pages, role):
    assert all(family.documentation for family in pages[role])


def test_names_follow_the_conventions():
    for metric in METRICS:
        assert re.fullmatch(r"kvpool_[a-z_]+", metric.name)
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
        assert (metric.kind is Kind.HISTOGRAM) <= metric.name.endswith("_seconds")
        assert metric.help.endswith(".")
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_names_metrics_and_labels_that_exist(expression):
    named = re.findall(r"\bkvpool_[a-z_]+", expression)
    labels = {
        label for group in re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", expression) for label in group.split(", ")
    }
    labels |= set(re.findall(r'([a-z_]+)=~?"', expression))

    assert set(named) <= SERIES.keys()
    known = {label for name in named for label in SERIES[name].labels}
    assert labels <= known | PROMETHEUS_LABELS


def test_every_metric_that_is_declared_is_of_use_to_somebody():
    """A dashboard of everything helps nobody; but a metric that nothing shows needs a reason to be there."""
    shown = {SERIES[name].name for text in EXPRESSIONS for name in re.findall(r"\bkvpool_[a-z_]+", text)}

    assert len(shown) > len(METRICS) / 2
    assert 15 <= len(PANELS) <= 30


def test_generated_files_are_up_to_date():
    stale = [path for path, text in generated().items() if (ROOT / path).read_text(encoding="utf-8") != text]

    assert stale == [], "run `make docs-generated`"


def test_every_alert_is_in_the_runbook():
    text = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")

    for alert in ALERTS:
        assert f"### {alert.name}\n" in text


def test_the_dashboard_has_a_place_for_each_panel():
    boxes = json.loads((ROOT / "deploy/grafana/dashboards/kvpool.json").read_text())["panels"]

    cells = {
        (box["gridPos"]["x"] + x, box["gridPos"]["y"] + y)
        for box in boxes
        for x in range(box["gridPos"]["w"])
        for y in range(box["gridPos"]["h"])
    }
    assert len(cells) == sum(box["gridPos"]["w"] * box["gridPos"]["h"] for box in boxes)
    assert max(x for x, _ in cells) == 23


@needs_promtool
@pytest.mark.parametrize("role", ["meta", "node", "client"])
def test_prometheus_accepts_what_is_exposed(texts, role):
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=texts[role], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@needs_promtool
@pytest.mark.parametrize(("what", "path"), [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_prometheus_accepts_the_files(what, path):
    command = ["promtool", "check", what, ROOT / "deploy/prometheus" / path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_services_are_what_prometheus_scrapes():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

    targets = [t for job in config["scrape_configs"] for static in job["static_configs"] for t in static["targets"]]

    assert {target.partition(":")[0] for target in targets} == {
        name for name in services if name == "metadata" or name.startswith("node-")
    }


def test_a_latency_counts_what_it_was_told():
    latency = Latency()
    for seconds in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, 99.0):
        latency.observe(seconds)

    counts, sum_s = latency.snapshot()

    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)
    assert sum_s == pytest.approx(99.0 + 2.01 * BUCKETS_S[0])


@pytest.mark.parametrize(
    ("name", "labels"),
    [("kvpool_unheard_of", {}), ("kvpool_node_joined", {}), ("kvpool_nodes", {}), ("kvpool_leases", {"node": "n"})],
)
def test_what_is_not_declared_cannot_be_exposed(name, labels):
    with pytest.raises((KeyError, AssertionError)):
        Exposition("meta").add(name, 1, **labels)


def test_the_time_of_every_request_is_counted(store):
    """A request without a name would fail when it is served."""
    store_side = DataSession(store, 1, local=True, ucx=object())
    service = MetaService(MetaSettings(), lambda: 0.0, os.urandom)

    assert store_side._handlers.keys() == node_meter.REQUESTS.keys()
    assert MetaSession(service)._handlers.keys() == meta_framed.REQUESTS.keys()
