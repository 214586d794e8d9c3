"""`kvpool bench vllm` and `kvpool demo-vllm` with real engines, at tiny sizes: what they promise, and nothing left."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.places import Place

COMMAND = [sys.executable, "-m", "kvpool.cli.main"]
RUN_S = 280

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as segments:
        place = Place(Path(segments))
        yield place
        for process in place.processes():
            process.kill()


def run(place, *arguments):
    result = subprocess.run(
        [*COMMAND, *arguments, "--format", "json"],
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    place.assert_clean()
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_demo_loads_in_one_engine_what_the_other_computed_and_answers_the_same(place):
    (report,) = run(place, "demo-vllm", "--prompts", "2", "--prompt-tokens", "500", "--answer-tokens", "4")

    assert (report["identical"], report["different_answers"]) == (2, 2)
    assert report["loaded_tokens"] >= 480
    assert report["local_tokens"] >= 480
    assert len(report["nodes"]) == 2


def test_the_bench_has_a_row_for_each_path(place):
    options = ["--rounds", "1", "--prompt-tokens", "500", "--decode-loads", "1"]
    rows = run(place, "bench", "vllm", "--paths", "none,local,kvpool-shm", *options)

    assert [(row["bench"], row["path"]) for row in rows] == [
        ("vllm", "none"),
        ("vllm", "local"),
        ("vllm", "kvpool-shm"),
        ("vllm_saving", "kvpool-shm"),
        ("vllm_decode", "kvpool-shm"),
    ]
    assert [row["tokens_loaded"] >= 480 for row in rows[:3]] == [False, True, True]
