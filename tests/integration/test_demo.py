"""`kvpool demo` as users run it: real processes, a small workload, and nothing left behind."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from kvpool.bench.process import RoleProcess
from kvpool.core.errors import UnavailableError
from tests.integration.places import Place

COMMAND = [sys.executable, "-m", "kvpool.cli.main", "demo", "--format", "json"]
SMALL = ["--conversations", "8", "--turns", "4", "--block-bytes", "4KiB"]


def run(place: Place, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options], env=place.environ, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(("transports", "used"), [("shm,tcp", "shm"), ("tcp", "tcp")])
def test_built_in_agents_reach_the_ideal_hit_rate_with_every_byte_right(place, transports, used):
    result = run(place, *SMALL, "--transports", transports)

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["mismatches"] == 0
    assert report["pool_hit_rate"] == pytest.approx(report["ideal_hit_rate"], abs=0.005)
    assert report["private_hit_rate"] < report["pool_hit_rate"] - 0.1
    assert report["verify_failures"] == 0
    assert report["loaded_by_transport"] == {used: report["totals"]["loaded_bytes"]}
    assert report["totals"]["loaded_bytes"] > 0
    assert report["totals"]["stored_blocks"] == report["unique_blocks"]
    assert len(report["nodes"]) == 2
    assert sum(node["blocks"] for node in report["nodes"]) == report["unique_blocks"]
    place.assert_clean()


def test_a_pool_too_small_for_the_workload_evicts_and_still_delivers_right_bytes(place):
    result = run(place, *SMALL, "--node-size", "1MiB")

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["mismatches"] == 0
    assert report["unique_blocks"] > sum(node["blocks"] for node in report["nodes"]) > 0
    assert all(node["used_bytes"] <= node["capacity_bytes"] for node in report["nodes"])
    assert report["totals"]["pool_tokens"] > 0
    assert report["pool_hit_rate"] < report["ideal_hit_rate"]
    place.assert_clean()


def test_a_trace_is_replayed_with_its_own_block_size(place, tmp_path):
    trace = tmp_path / "trace.jsonl"
    prompts = [list(range(20)), list(range(30)), [*range(20), 90, 91], list(range(40))]
    lines = (
        {"timestamp": i, "input_length": len(ids) * 64 - 3, "output_length": 1, "hash_ids": ids}
        for i, ids in enumerate(prompts)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    result = run(place, "--trace", str(trace), "--engines", "2", "--nodes", "1")

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["block_tokens"], report["requests"], report["mismatches"]) == (64, 4, 0)
    assert report["pool_hit_rate"] == pytest.approx(report["ideal_hit_rate"])
    place.assert_clean()


def test_a_table_is_printed_for_people(place):
    result = subprocess.run(
        [*COMMAND[:-2], *SMALL], env=place.environ, capture_output=True, text=True, timeout=100, check=False
    )

    assert result.returncode == 0, result.stderr
    for words in (
        "private: 4 engines",
        "the same engines with the pool",
        "ideal: one infinite cache",
        "node-2",
    ):
        assert words in result.stdout
    place.assert_clean()


def test_a_malformed_trace_is_a_usage_error_before_anything_starts(place, tmp_path):
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}\n{"timest')

    result = run(place, "--trace", str(trace))

    assert result.returncode == 2
    assert "bad.jsonl, line 2" in result.stderr
    assert result.stdout == ""
    place.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_demo_that_is_stopped_in_the_middle_stops_its_processes(place, number):
    demo = subprocess.Popen(
        [*COMMAND, "--conversations", "500"],
        env=place.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    # Segments appear when a node has begun to serve: the demo is then past its start and has much to do.
    while not any(path.is_file() for path in place.segments.rglob("*")):
        with pytest.raises(subprocess.TimeoutExpired):
            demo.wait(0.05)

    demo.send_signal(number)
    _, stderr = demo.communicate(timeout=60)

    assert demo.returncode != 0, stderr
    place.assert_clean()


def test_a_role_that_cannot_start_is_an_error_that_quotes_its_log(tmp_path):
    log = tmp_path / "node.log"
    with (
        RoleProcess("node", {"size": "much"}, log) as role,
        pytest.raises(UnavailableError, match=r"kvpool node .* ended with status [1-9].*'much'"),
    ):
        role.ready()

    assert not psutil.pid_exists(role.pid)
