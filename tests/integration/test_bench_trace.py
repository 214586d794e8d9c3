"""`kvpool bench trace` as users run it: a small generated trace, a real pool, real bytes."""

import importlib.util
import json
import random

import pytest

from kvpool.cli.main import main


@pytest.fixture
def trace(tmp_path):
    """Twelve conversations of six turns, half a second between two requests; 16 tokens a block."""
    rng, ids, lines = random.Random(5), iter(range(1, 10_000)), []
    chains = [[0, *(next(ids) for _ in range(5))] for _ in range(12)]
    for _ in range(6):
        for chain in rng.sample(chains, len(chains)):
            chain += [next(ids), next(ids)]
            fields = {"input_length": 16 * len(chain), "output_length": 1, "hash_ids": chain[:]}
            lines.append(json.dumps({"timestamp": 500 * len(lines), **fields}) + "\n")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def row_of(capsys, trace):
    def row_of(*arguments: str) -> dict:
        assert main(["bench", "trace", str(trace), "--block-bytes", "4KiB", *arguments, "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    return row_of


def test_a_full_pool_hits_what_the_simulator_says(row_of):
    row = row_of("--capacity", "40%")

    assert 0 < row["hit_rate"] < row["ideal_hit_rate"]
    assert row["hit_rate"] == pytest.approx(row["simulated_hit_rate"], abs=0.005)
    assert row["mismatches"] == row["refused_blocks"] == 0
    assert row["evicted_blocks"] > 0
    assert row["loaded_by_transport"] == {"shm": row["loaded_bytes"]}
    steps = {step["step"]: step for step in row["steps"]}
    assert steps["match"]["calls"] == row["requests"] == 72
    assert all(0 < step["p50_ms"] <= step["p99_ms"] <= step["max_ms"] for step in steps.values())


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_an_open_loop_begins_requests_when_they_arrived_and_writes_a_page(row_of, tmp_path):
    page = tmp_path / "report.html"
    row = row_of("--loop", "open", "--speed", "1000", "--callers", "2", "--capacity", "100%", "--report", str(page))

    assert row["late_p99_ms"] >= 0
    assert row["elapsed_s"] >= 0.5 * 71 / 1000  # the last one arrives then
    assert 0 < row["hit_rate"] <= row["ideal_hit_rate"]
    assert "data:image/png;base64," in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--capacity", "0%"], "must be above 0%"),
        (["--capacity", "1%", "--nodes", "8"], "give more"),
        (["--speed", "0"], "speed is 0"),
        (["--block-bytes", "100"], "multiple of"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(arguments, complaint, trace, capsys):
    assert main(["bench", "trace", str(trace), *arguments]) == 2
    assert complaint in capsys.readouterr().err
