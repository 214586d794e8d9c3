"""The shipped Prometheus configuration on a real Prometheus, and a real pool behind it."""

import json
import re
import shutil
import subprocess
import threading
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from kvpool.ops.metrics.alerts import ALERTS
from kvpool.ops.metrics.panels import PANELS, WINDOW
from tests.http_pages import ask
from tests.integration.conftest import blank, embedded_in, open_blocks, random_chain
from tests.waiting import eventually

SHIPPED = Path(__file__).parents[2] / "deploy" / "prometheus"
QUERIES = [query.expression for panel in PANELS for query in panel.queries]
SCRAPES = 3
"""Rates need two."""

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    address: str

    def get(self, path, **parameters):
        answer = json.loads(ask(self.address, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}").text)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression):
        return self.get("query", query=expression)["result"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    with embedded_in(folder, "n0", "4MiB", meta={"events_port": 0}, disk=folder, disk_size="4MiB") as pool:
        yield pool


@pytest.fixture(scope="module")
def prometheus(pool, tmp_path_factory):
    """Watches the pool as the shipped configuration says, and more often."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"}
    addresses = {"kvpool-metadata": pool.meta.http_address, "kvpool-node": pool.nodes[0].http_address}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [addresses[job["job_name"]]]}]
    shutil.copy(SHIPPED / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
               "--web.listen-address=127.0.0.1:0"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        listening = (re.search(r'msg="Listening on" address=(\S+)', line) for line in process.stderr)
        address = next(found[1] for found in listening if found)
        reader = threading.Thread(target=process.stderr.read)  # it must not block on a full pipe
        reader.start()
        eventually(lambda: ask(address, "/-/ready").status == 200)
        yield Prometheus(address)
        process.terminate()
        reader.join()


@pytest.fixture(scope="module")
def watched(pool, prometheus):
    """Prometheus, once it has seen a pool at work."""
    with pool.connect() as client:
        blocks, chain = open_blocks(client, 4096), random_chain(4)
        blocks.store(chain, np.ones((4, 4096), np.uint8))
        blocks.match(chain)
        blocks.load(chain, blank(4, 4096))
        eventually(lambda: float(prometheus.query("scalar(min(count_over_time(up[1m])))")[1]) >= SCRAPES)
    return prometheus


def test_every_target_is_up(watched):
    targets = watched.get("targets")["activeTargets"]

    assert {target["labels"]["job"]: target["health"] for target in targets} == {
        "kvpool-metadata": "up", "kvpool-node": "up",
    }  # fmt: skip


def test_every_alert_is_evaluated_and_a_healthy_pool_fires_none(watched):
    def rules():
        [group] = watched.get("rules")["groups"]
        return group["rules"]

    eventually(lambda: all(rule["health"] != "unknown" for rule in rules()))

    assert {rule["name"]: rule["health"] for rule in rules()} == {alert.name: "ok" for alert in ALERTS}
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


@pytest.mark.parametrize("expression", QUERIES)
def test_every_panel_shows_something(watched, expression):
    """Of what services expose: programs register their clients' metrics themselves."""
    result = watched.query(expression.replace(WINDOW, "1m"))

    assert result or "kvpool_client_" in expression
