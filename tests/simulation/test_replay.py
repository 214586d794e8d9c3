"""A seed decides everything: a schedule can be repeated to the byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .schedule import run_schedule
from .searching import SEED, check

PRINT_DIGEST = """
import hashlib, sys
import msgspec
sys.path.insert(0, {tests!r})
from simulation.schedule import run_schedule
for seed in range(6):
    outcome = run_schedule(seed)
    print(outcome.steps, hashlib.sha256(msgspec.json.encode(outcome.history.records)).hexdigest())
"""


@pytest.mark.skipif(SEED is None, reason="no KVPOOL_SIM_SEED given")
def test_the_schedule_that_was_asked_for(tmp_path):
    outcome = run_schedule(int(SEED), validate=True)
    check(outcome, tmp_path)


@pytest.mark.skipif(SEED is not None, reason="KVPOOL_SIM_SEED names a schedule of its own")
def test_a_schedule_is_the_same_in_every_process():
    program = PRINT_DIGEST.format(tests=str(Path(__file__).parents[1]))
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert len(set(runs[0].splitlines())) == 6, "schedules differ"
    assert runs[0] == runs[1]


@pytest.mark.skipif(SEED is not None, reason="KVPOOL_SIM_SEED names a schedule of its own")
def test_schedules_do_what_they_are_for():
    """Every fault strikes, blocks are copied and evicted, slots used again, reads hit and are refused by checksums."""
    outcomes = [run_schedule(seed) for seed in range(300)]
    faults = set().union(*(outcome.faults for outcome in outcomes))
    events = sum((outcome.events for outcome in outcomes), start=type(outcomes[0].events)())
    from .faults import FAULTS

    assert faults == {*FAULTS, "dead", "reset", "twice"}
    for name in (
        "committed",
        "copied",
        "reclaimed",
        "evicted",
        "expired",
        "no_slot",
        "commits_failed",
        "expired_writes",
    ):
        assert events[name], name
    for name in ("loaded_shm", "loaded_tcp", "unverified", "recovering", "node_down", "over_deadline", "in_flight"):
        assert events[name], name
    assert sum(outcome.commits for outcome in outcomes) > 1_000
    assert sum(outcome.loaded for outcome in outcomes) > 500
