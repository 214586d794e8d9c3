"""Real vLLM engines for tests: processes of their own, asked beside each other, watched and held from outside."""

import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
ENVIRON = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
START_S = 150
ANSWER_S = 60
"""No request takes longer, whatever fails: the time-outs of the connector are far below."""

PROBES = 20
"""How often a half of the connector is looked at again when it changed meanwhile."""

STOP_S = 20
THREADS_MAX = 40
"""Python threads in one process of an engine, vLLM's own included."""


class EngineError(Exception):
    pass


def digest(block):
    return hashlib.sha256(np.ascontiguousarray(block)).hexdigest()


def soon(condition, what):
    """Poll what must come true; says what did not."""
    end_s = time.monotonic() + ANSWER_S

    def ended():
        assert time.monotonic() < end_s, f"not within {ANSWER_S} s: {what}"
        return condition()

    eventually(ended)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    finish: str
    cached_tokens: int
    prompt: list[int]
    ttft_s: float | None


class Engine:
    """One engine; close it. With ``pool`` it has the probed connector."""

    def __init__(self, model, log, *, pool=None, policy="recompute", environ=None, connector=None, **options):
        self._folder = Path(tempfile.mkdtemp(prefix="kvpool-probe-"))  # short: Unix sockets have short names
        self._log = log
        self._probed = connector is None
        if pool is not None:
            module = "tests.vllm.probed_connector"
            options["kv_transfer_config"] = {
                "kv_connector": connector or "ProbedConnector",
                **({"kv_connector_module_path": module} if connector is None else {}),
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": pool,
            }
        options = {"model": str(model), "enforce_eager": True, "disable_log_stats": False, **options}
        environ = {**ENVIRON, "KVPOOL_PROBE": str(self._folder), **(environ or {})}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | environ,
                cwd=ROOT,
                start_new_session=True,
            )
        self._numbers = itertools.count(1)
        self._replies = {0: Future()}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._write(options)

    def wait_ready(self):
        self._take(self._replies[0], START_S)
        return self

    # Requests

    def start(self, prompt, max_tokens=8, **params):
        """Begin a request and go on; `Running.answer` waits for it."""
        params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, **params}
        return Running(self, *self._send(do="generate", prompt=prompt, params=params))

    def ask(self, prompt, max_tokens=8, **params):
        return self.start(prompt, max_tokens, **params).answer()

    def reset(self, *, connector=False):
        """Forget what the engine itself has cached."""
        return self._call(do="reset", connector=connector)["ok"]

    def metrics(self):
        return self._call(do="metrics")

    def check_alive(self):
        self._call(do="health")

    # Looking inside

    def scheduler(self):
        return self._probe("scheduler")

    def worker(self):
        return self._probe("worker")

    def count(self, name):
        """One of the connector's counters, of both its halves."""
        return sum(state["counts"].get(name, 0) for state in (self.scheduler(), self.worker()))

    def said(self, text):
        return text in self._log.read_text(errors="replace")

    @contextmanager
    def hold(self, kind):
        """Stop the worker's jobs at a point of theirs while the context lasts; its value waits until some are."""
        path = self._folder / f"hold-{kind}"
        path.touch()
        try:
            yield lambda count=1: soon(lambda: self.worker()["held"].get(kind, 0) >= count, f"{kind} is held")
        finally:
            path.unlink()

    def wait_saved(self):
        """Until the engine has nothing left to save."""
        soon(lambda: not self.scheduler()["saves"], "all is saved")

    def check_idle(self):
        """Nothing is left of what was asked: no request, job, reference, block or thread. Waits for the last steps."""
        keys = ("requests", "loads", "saves", "pinned_blocks", "used_blocks")
        soon(lambda: not any(self.scheduler()[key] for key in keys), f"no {keys}")
        soon(lambda: not any(self.worker()[key] for key in ("loads", "cancelled")), "no loads")
        for state in (self.scheduler(), self.worker()):
            assert state["hook_failures"] == 0
            assert len(state["threads"]) <= THREADS_MAX, state["threads"]
            counted = {kind: sum(name.startswith(f"kvpool-{kind}") for name in state["threads"]) for kind in LIMITS}
            assert all(counted[kind] <= LIMITS[kind] for kind in LIMITS), counted
        self.check_alive()

    # Ending

    def quit(self):
        with suppress(OSError, ValueError):
            self._process.stdin.close()

    def close(self):
        self.quit()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        shutil.rmtree(self._folder)

    def _probe(self, half):
        assert self._probed
        for _ in range(PROBES):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(ANSWER_S)
                peer.connect(str(self._folder / f"{half}.sock"))
                with peer.makefile() as file:
                    state = json.loads(file.read())
            if "busy" not in state:
                return state
        raise EngineError(f"the {half}'s half cannot be looked at: {state['busy']}")

    def _call(self, **command):
        _, future = self._send(**command)
        return self._take(future, ANSWER_S)

    def _send(self, **command):
        number = next(self._numbers)
        future = self._replies[number] = Future()
        self._write({"id": number, **command})
        return number, future

    def _write(self, message):
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
            except OSError:
                raise EngineError(f"the engine is gone; {self._tail()}") from None

    def _take(self, future, timeout_s):
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise EngineError(f"no answer in {timeout_s} s; {self._tail()}") from None

    def _read(self):
        with self._process.stdout as stdout:
            for line in stdout:
                reply = json.loads(line)
                future = self._replies[reply["id"]]
                if "error" in reply:
                    future.set_exception(EngineError(f"{reply['error']}; {self._tail()}"))
                else:
                    future.set_result(reply["value"])
        for future in list(self._replies.values()):
            if not future.done():
                future.set_exception(EngineError(f"the engine ended; {self._tail()}"))

    def _tail(self):
        return f"its log ends: {self._log.read_bytes()[-3_000:].decode(errors='replace')}"


LIMITS = {"lookup": 4, "reserve": 1, "link": 1, "load": 2, "save": 1}
"""Threads of the connector in one process, by what they do."""


@dataclass(frozen=True)
class Running:
    """A request that has begun."""

    engine: Engine
    number: int
    future: Future

    def answer(self):
        return Answer(**self.engine._take(self.future, ANSWER_S))

    def abort(self):
        self.engine._call(do="abort", which=self.number)

    @property
    def done(self):
        return self.future.done()
