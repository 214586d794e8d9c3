"""Makes files of the declarations: the reference page, the dashboard, the alert rules."""

import json
from itertools import groupby
from operator import attrgetter
from typing import Any

import yaml

from kvpool.ops.metrics.alerts import ALERTS, Alert
from kvpool.ops.metrics.declared import METRICS, Kind, Metric
from kvpool.ops.metrics.latency import BUCKETS_S
from kvpool.ops.metrics.panels import PANELS, Panel

RUNBOOK = "docs/deployment.md#"
PANELS_A_LINE = 3
PANEL_WIDTH, PANEL_HEIGHT = 24 // PANELS_A_LINE, 8
_MADE = "made of kvpool/ops/metrics by `make docs-generated`: do not edit"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def generated() -> dict[str, str]:
    """Every generated file: its content by its path in the repository."""
    return {
        "docs/metrics.md": reference(),
        "deploy/prometheus/alerts.yml": alert_rules(),
        "deploy/grafana/dashboards/kvpool.json": dashboard(),
    }


def reference() -> str:
    """The page that explains every metric and every alert."""
    lines = [
        f"<!-- {_MADE} -->",
        "# Metrics",
        "",
        "Each role serves them on `/metrics` ([deployment](deployment.md)); a client's are registered by the program",
        "that it lives in: `prometheus_client.REGISTRY.register(pool.collector())`. The usual `process_*` metrics of",
        "the two services come with them. Counters have no rates beside them: PromQL makes those.",
        "",
        f"Histograms have buckets from {BUCKETS_S[0] * 1e6:g} µs to {BUCKETS_S[-1]:g} s. Every value but theirs is",
        "read from counts that are kept anyway, when it is asked for. There is no metric for unverified reads: there",
        "are no such reads.",
    ]
    for question, metrics in groupby(METRICS, attrgetter("question")):
        lines += [
            "",
            f"## {question}",
            "",
            "| metric | kind | labels | from | what |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += map(_row, metrics)
    lines += ["", "## Alerts", "", "In `deploy/prometheus/alerts.yml`. `page`: now; `ticket`: in working hours.", ""]
    lines += ["| alert | severity | fires when | for |", "| --- | --- | --- | --- |"]
    lines += map(_alert_row, ALERTS)
    return "\n".join(lines) + "\n"


def alert_rules() -> str:
    """A file of rules for Prometheus."""
    rules = [_rule(alert) for alert in ALERTS]
    body = yaml.safe_dump({"groups": [{"name": "kvpool", "rules": rules}]}, sort_keys=False, width=200)
    return f"# {_MADE}\n{body}"


def dashboard() -> str:
    """A dashboard for Grafana."""
    boxes: list[dict[str, Any]] = []
    top = 0
    for question, panels in groupby(PANELS, attrgetter("question")):
        row = {"type": "row", "title": question, "collapsed": False, "gridPos": _place(0, top, 24, 1), "panels": []}
        boxes.append(row)
        top += 1
        for i, panel in enumerate(panels):
            line, column = divmod(i, PANELS_A_LINE)
            place = _place(column * PANEL_WIDTH, top + line * PANEL_HEIGHT, PANEL_WIDTH, PANEL_HEIGHT)
            boxes.append(_graph(panel, place))
        top += (line + 1) * PANEL_HEIGHT
    for number, box in enumerate(boxes, 1):
        box["id"] = number
    return json.dumps(_frame(boxes), indent=1) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(metric.labels) or "none"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {', '.join(metric.roles)} | {metric.help} |"


def _alert_row(alert: Alert) -> str:
    expression = alert.expression.replace("|", "\\|")
    name = f"[{alert.name}](deployment.md#{alert.name.lower()})"
    return f"| {name} | {alert.severity} | `{expression}` | {alert.lasting} |"


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.advice,
            "runbook_url": f"{RUNBOOK}{alert.name.lower()}",
        },
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": query.expression, "legendFormat": query.legend, "datasource": _SOURCE}
        for i, query in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _frame(boxes: list[dict[str, Any]]) -> dict[str, Any]:
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": "kvpool",
        "uid": "kvpool",
        "description": _MADE,
        "tags": ["kvpool"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": boxes,
    }


def series_of(metric: Metric) -> set[str]:
    """Names under which Prometheus stores a metric."""
    if metric.kind is Kind.HISTOGRAM:
        return {f"{metric.name}{suffix}" for suffix in ("_bucket", "_sum", "_count")}
    return {metric.name}
