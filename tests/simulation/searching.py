"""Which schedules a test run tries, and what it says of those that break something."""

import os
from random import SystemRandom

import pytest

from .schedule import run_schedule

SCHEDULES = 10_000
CHUNKS = 100
"""Parts of a run, each one test: workers share them."""

SEED = os.environ.get("KVPOOL_SIM_SEED")
"""Run this schedule alone, with every check."""

SEARCHING = os.environ.get("KVPOOL_SIM_PROFILE", "ci") == "dev"
"""``dev`` tries other schedules each time; ``ci`` always the same."""

VALIDATE_EVERY = 10
"""One schedule in so many checks the state machines at every step."""


def try_chunk(chunk, tmp_path):
    """Run one part of the schedules; fails with the first that breaks something."""
    if SEED is not None:
        pytest.skip("KVPOOL_SIM_SEED names a schedule of its own")
    count = SCHEDULES // CHUNKS
    first = SystemRandom().getrandbits(48) if SEARCHING else chunk * count
    for seed in range(first, first + count):
        check(run_schedule(seed, validate=seed % VALIDATE_EVERY == 0), tmp_path)


def check(outcome, tmp_path):
    """Fail when the schedule broke something, and say how to see it again."""
    if outcome.violations:
        path = tmp_path / "history.jsonl"
        outcome.history.save(path)
        shown = "\n".join(f"  {violation}" for violation in outcome.violations[:10])
        pytest.fail(
            f"schedule {outcome.seed} broke its promises:\n{shown}\n"
            f"faults: {outcome.faults}; history: {path}\n"
            f"again: KVPOOL_SIM_SEED={outcome.seed} pytest tests/simulation",
            pytrace=False,
        )
