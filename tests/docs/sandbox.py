"""A machine to try the documentation on: its own loopback, so that every port is free, its own shared memory, and its
own processes, all of which end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import kvpool
from tests.docs.blocks import ROOT, Step, pattern_of
from tests.waiting import eventually

COMMAND_S = 60
ADDRESSES = ("10.0.0.1/32", "10.0.0.2/32")
"""Of the hosts that the documentation has: here they are one."""

_SETUP = " && ".join([
    "ip link set lo up",
    *(f"ip address add {address} dev lo" for address in ADDRESSES),
    "mount -t tmpfs tmpfs /dev/shm",
    "echo up",
    "exec cat",
])  # fmt: skip


def why_not() -> str:
    """Why there can be no such machine here; empty if there can."""
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces: {tried.stderr.decode().strip()}"


class Sandbox:
    """A context manager; commands run in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._staying: list[subprocess.Popen[bytes]] = []
        (folder / ".venv").symlink_to(sys.prefix)
        self._environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{Path(kvpool.__file__).parents[1]}:{ROOT / 'connector'}",
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "LANG": "C.UTF-8",
        }

    def __enter__(self) -> Self:
        self._machine = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _SETUP],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        # Its first process ends with this one, however that ends: nobody holds its input open then.
        assert self._machine.stdout.readline() == b"up\n"
        self._first = _child_of(self._machine)
        return self

    def __exit__(self, *error: object) -> None:
        self._machine.kill()  # and with it, all that runs there
        self._machine.communicate()
        for process in self._staying:
            process.wait()

    def run(self, step: Step) -> None:
        """One command, which must succeed and print what it is said to print."""
        done = subprocess.run(
            self._inside(["bash", "-euo", "pipefail", "-c", step.command]), cwd=self._folder, env=self._environ,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {step.command}\nexit status {done.returncode}:\n{done.stdout}"
        if step.output.strip():
            printed = done.stdout.strip()
            assert pattern_of(step.output).fullmatch(printed), f"$ {step.command}\nit printed:\n{printed}"

    def run_python(self, code: str) -> None:
        """A program, which must succeed."""
        program = self._folder / "program.py"
        program.write_text(code, encoding="utf-8")
        self.run(Step(f"python {program}", ""))

    def start(self, step: Step) -> None:
        """A command that stays: until it has printed what it is said to print, or, of roles, that they are ready."""
        log = self._folder / f"stays-{len(self._staying)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._inside(["bash", "-c", f"exec {step.command}"]), cwd=self._folder, env=self._environ,
                stdout=output, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._staying.append(process)
        expected = pattern_of(step.output or "kvpool ...")

        def said() -> bool:
            assert process.poll() is None, f"$ {step.command}\nended: {log.read_text()}"
            return bool(expected.fullmatch(log.read_text(encoding="utf-8").strip()))

        began_s = time.monotonic()
        try:
            eventually(lambda: said() or time.monotonic() - began_s > COMMAND_S)
        finally:
            assert said(), f"$ {step.command}\nit printed:\n{log.read_text(encoding='utf-8')}"

    def stop(self) -> None:
        """End what stays."""
        for process in reversed(self._staying):
            os.kill(_child_of(process), signal.SIGINT)
            process.wait()
        self._staying.clear()

    def _inside(self, command: list[str]) -> list[str]:
        return ["nsenter", f"--target={self._first}", "--net", "--mount", "--pid", f"--wdns={self._folder}", *command]


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """The one process that it waits for: what it runs in the other namespaces."""
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    return int(child)
