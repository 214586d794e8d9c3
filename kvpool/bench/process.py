"""Starts kvpool roles as child processes, waits until each says that it is ready, and stops every one.

A role writes one JSON object with its addresses to stdout once it serves; everything else it says goes to
stderr, which is kept in a file and quoted when the role fails.
"""

import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from kvpool.core.errors import UnavailableError

READY_S = 30.0
"""How long a role may take to start; preparing its memory is the longest part."""

STOP_S = 10.0
"""How long a role may take to end after being asked to, before it is killed."""

LOG_TAIL_BYTES = 2_000
"""How much of a failed role's log its error quotes."""


class ChildProcess:
    """A child whose stdout is read line by line and whose stderr goes to a file. Not thread-safe.

    The child is in its own session: a Ctrl-C reaches only the parent, which then stops its children in order.

    Args:
        name: What errors call it.
        command: Program and arguments.
        log: File for its stderr.
        stdin: As for `subprocess.Popen`.
        environ: Its environment; None: this process's.
        log_tail_bytes: How much of its log errors quote.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        stdin: int = subprocess.DEVNULL,
        environ: Mapping[str, str] | None = None,
        log_tail_bytes: int = LOG_TAIL_BYTES,
    ) -> None:
        self.name = name
        self._log = log
        self._log_tail_bytes = log_tail_bytes
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, arguments as a list
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=environ, start_new_session=True
            )
        assert self._process.stdout is not None
        # Read to the end, not to the line waited for: a child must never block on a pipe that nobody empties.
        self._reader = threading.Thread(target=_forward, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The child's process id, which is also that of its group."""
        return self._process.pid

    def stop(self) -> None:
        """Ask the child to end, wait, and kill it if it does not; safe to call again."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _failure(self, what: str) -> UnavailableError:
        tail = log_tail(self._log, self._log_tail_bytes)
        return UnavailableError(f"{self.name} (process {self.pid}) {what}; its log ends: {tail}")


class RoleProcess(ChildProcess):
    """One `kvpool` role in a process of its own; a context manager that leaves no process behind."""

    def __init__(
        self,
        role: str,
        options: Mapping[str, object],
        log: Path,
        *,
        environ: Mapping[str, str] | None = None,
        module: str = "kvpool.cli.main",
    ) -> None:
        given = {**options, "format": "json"}
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", module, role, *flags]
        super().__init__(f"kvpool {role}", command, log, environ=environ)

    def ready(self, timeout_s: float = READY_S) -> dict[str, Any]:
        """The role's ready line; waits for it.

        Raises:
            UnavailableError: The role ended, said something else or took too long; quotes the end of its log.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"was not ready within {timeout_s:g} s") from None
        if not line:
            raise self._failure(f"ended with status {self._process.wait()} before it was ready")
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._failure(f"said {line[:200]!r} instead of that it is ready") from None

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The status of a role that ends by itself; raises TimeoutExpired."""
        return self._process.wait(timeout_s)


def log_tail(log: Path, size_bytes: int = LOG_TAIL_BYTES) -> str:
    """The end of a child's log, for an error; ``empty`` when it said nothing."""
    return log.read_bytes()[-size_bytes:].decode(errors="replace").strip() or "empty"


def _forward(stdout: IO[bytes], lines: "queue.SimpleQueue[bytes]") -> None:
    """Pass lines on; an empty one means that there are no more."""
    with stdout:
        for line in stdout:
            lines.put(line)
    lines.put(b"")
