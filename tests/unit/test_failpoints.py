"""Failpoints: what the variable may say, what each action does, and that every name is reached by some scenario."""

import ast
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvpool
from kvpool.core.errors import SettingsError, UnavailableError
from kvpool.ops import failpoints
from kvpool.ops.failpoints import FAILPOINTS, VARIABLE, arm, failpoint
from tests.waiting import eventually, is_frozen

POINT = "node.put.before_header"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm({})


def literals(path: Path, *, calls: str | None = None) -> set[str]:
    """The texts in a source file; with ``calls``, those that are the argument of a call of that name."""
    tree = ast.parse(path.read_text())
    if calls is None:
        return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == calls]
    return {argument.value for call in found for argument in call.args}


def test_every_failpoint_stands_somewhere_in_the_code():
    placed = set().union(*(literals(path, calls="failpoint") for path in (ROOT / "kvpool").rglob("*.py")))

    assert placed == set(FAILPOINTS)


def test_every_failpoint_is_reached_by_some_scenario():
    """Each scenario waits until its point is hit."""
    tests = (ROOT / "tests" / "integration").glob("test_failpoints_*.py")

    assert set(FAILPOINTS) <= set().union(*map(literals, tests))


def test_nothing_happens_unless_the_variable_is_set():
    arm({VARIABLE: f"{POINT}=raise:MemoryError"})
    arm({})
    failpoint(POINT)


def test_an_armed_point_raises_each_time_and_others_do_nothing():
    arm({VARIABLE: f"{POINT}=raise:UnavailableError, node.put.mid_bytes=raise:ENOSPC"})

    for _ in range(2):
        with pytest.raises(UnavailableError, match=POINT):
            failpoint(POINT)
    with pytest.raises(OSError, match=r"node\.put\.mid_bytes") as raised:
        failpoint("node.put.mid_bytes")
    assert raised.value.errno == errno.ENOSPC
    failpoint("node.put.mid_header")


def test_a_file_arms_a_point_for_the_first_who_reaches_it(tmp_path):
    arm({VARIABLE: str(tmp_path)})
    failpoint(POINT)
    (tmp_path / f"{POINT}.armed").write_text("raise:MemoryError")

    with pytest.raises(MemoryError, match=POINT):
        failpoint(POINT)

    assert [path.name for path in tmp_path.iterdir()] == [f"{POINT}.hit"]
    failpoint(POINT)


def test_a_pause_lasts_until_its_file_goes(tmp_path):
    arm({VARIABLE: f"{POINT}=pause,{tmp_path}"})
    thread = threading.Thread(target=failpoint, args=(POINT,))
    thread.start()
    hit = tmp_path / f"{POINT}.hit"
    eventually(hit.exists)
    assert thread.is_alive()

    hit.unlink()
    thread.join()


def test_a_pause_that_nobody_ends_is_over_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(failpoints, "PAUSE_S", 0.01)
    arm({VARIABLE: f"{POINT}=pause,{tmp_path}"})

    failpoint(POINT)

    assert (tmp_path / f"{POINT}.hit").exists()


def child(text: str) -> subprocess.Popen:
    """A process that reaches the point and ends."""
    code = f"import os; from kvpool.ops.failpoints import *; arm(os.environ); failpoint({POINT!r})"
    environ = os.environ | {VARIABLE: text}
    return subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.DEVNULL)


def test_a_process_dies_at_the_point_that_says_so():
    assert child(f"{POINT}=kill").wait() == -signal.SIGKILL


def test_a_process_stops_until_it_is_told_to_go_on():
    process = child(f"{POINT}=stop")
    eventually(lambda: is_frozen(process.pid))
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0


def test_a_process_sleeps_and_goes_on():
    assert child(f"{POINT}=sleep:0.01").wait() == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("node.put.befor_header=kill", "'node.put.befor_header' is no failpoint; there are client.match"),
        (POINT, f"write e.g. {POINT}=kill"),
        (f"{POINT}=explode", "'explode' is no action; use kill"),
        (f"{POINT}=raise:KeyboardInterrupt", "'raise:KeyboardInterrupt' is no action"),
        (f"{POINT}=sleep:long", "'sleep:long' is no action"),
        (f"{POINT}=pause", "add a directory"),
        ("/nowhere/at/all", "/nowhere/at/all is no directory"),
    ],
)
def test_what_the_variable_cannot_mean_is_refused_at_the_start(text, named):
    with pytest.raises(SettingsError, match=VARIABLE) as refused:
        arm({VARIABLE: text})
    assert named in str(refused.value)
    failpoint(POINT)


def test_a_process_that_fails_on_purpose_says_so_and_a_bad_variable_ends_it(monkeypatch, tmp_path):
    def started(text: str) -> subprocess.CompletedProcess:
        ports = ("--data-port=0", "--grpc-port=0", f"--unix-socket={tmp_path}/n.sock", "--join-timeout=10ms")
        command = [sys.executable, "-m", "kvpool.cli.main", "node", "--size=4KiB", f"--segment-dir={tmp_path}", *ports]
        return subprocess.run(command, env=os.environ | {VARIABLE: text}, capture_output=True, text=True, check=False)

    refused = started("x=kill")
    assert (refused.returncode, "'x' is no failpoint" in refused.stderr) == (2, True)
    assert "failpoints_active" in started(f"{POINT}=kill").stderr
    monkeypatch.setenv(VARIABLE, "x=kill")
    with pytest.raises(SettingsError, match="'x' is no failpoint"):
        kvpool.connect("grpc://127.0.0.1:1")
