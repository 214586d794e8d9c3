"""Commands that are told to stop: whatever was running is gone, also when the signal comes twice, as from `timeout`."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

FREE_PORTS = ("--grpc-port", "0", "--framed-port", "0", "--data-port", "0")
STOP_TIMEOUT_S = 30


@pytest.fixture
def up(place):
    """`kvpool up` that has said that it is ready."""
    socket = place.segments / "up.sock"
    command = [sys.executable, "-m", "kvpool.cli.main", "up", "--size", "8MiB", "--unix-socket", str(socket)]
    with subprocess.Popen(
        [*command, *FREE_PORTS, "--format", "json", "--log-level", "warning"],
        env=place.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pool_that_is_told_to_stop_ends_well(place, up, number):
    assert json.loads(up.stdout.readline())["event"] == "ready"

    up.send_signal(number)

    assert up.wait(STOP_TIMEOUT_S) == 0
    place.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pool_that_is_told_again_and_again_still_cleans_up(place, up, number):
    assert json.loads(up.stdout.readline())["event"] == "ready"

    insist(up, number)

    place.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pool_that_is_told_to_stop_while_it_starts_leaves_nothing(place, up, number):
    while up.poll() is None and not any(place.segments.iterdir()):
        pass  # the segment is there: starting, and not yet ready

    insist(up, number)

    place.assert_clean()


def insist(process, number):
    """Signal until the process has ended; its exit code may be the signal's, at the very end of the interpreter."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while process.poll() is None:
        assert time.monotonic() < deadline, "it does not end"
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.002)
