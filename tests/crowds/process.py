"""Crowds in processes of their own, and samples of what processes hold."""

import json
import queue
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from kvpool.bench.process import ChildProcess
from tests.crowds.crowd import CrowdSettings, arguments
from tests.waiting import eventually

ANSWER_S = 90.0


class CrowdProcess(ChildProcess):
    """One crowd; a context manager that leaves no process behind."""

    def __init__(self, settings: CrowdSettings, log: Path) -> None:
        super().__init__(f"crowd {settings.seed}", arguments(settings), log, stdin=subprocess.PIPE)

    def __enter__(self):
        return self

    def hear(self) -> dict:
        try:
            line = self._lines.get(timeout=ANSWER_S)
        except queue.Empty:
            raise self._failure("said nothing for long: a call hangs") from None
        if not line:
            raise self._failure("ended")
        return json.loads(line)

    def tell(self, order: str) -> None:
        self._process.stdin.write(f"{order}\n".encode())
        self._process.stdin.flush()

    def stop(self) -> None:
        self._process.stdin.close()  # no more orders: it ends by itself
        super().stop()


class Crowds:
    """Several crowds, asked together."""

    def __init__(self, processes: list[CrowdProcess]) -> None:
        self.processes = processes

    def report(self) -> dict[str, Counter]:
        return self._ask("report")

    def finish(self) -> dict[str, Counter]:
        """The last report: every call has ended, every client is closed; the processes still live."""
        return self._ask("stop")

    def go_on(self, what: str, times: int) -> None:
        """Wait until the crowds have done so much more of something."""
        before = self.report()["counts"][what]
        eventually(lambda: self.report()["counts"][what] >= before + times)

    def _ask(self, order: str) -> dict[str, Counter]:
        for process in self.processes:
            process.tell(order)
        reports = [process.hear() for process in self.processes]
        counts: Counter[str] = Counter()
        misses: Counter[str] = Counter()
        for report in reports:
            counts.update(report["counts"])
            misses.update(report["misses"])
        return {"counts": counts, "misses": misses, "most_retries": max(report["most_retries"] for report in reports)}


@contextmanager
def crowds(settings: list[CrowdSettings], directory: Path) -> Iterator[Crowds]:
    """All connected, and calling."""
    with ExitStack() as stack:
        found = [stack.enter_context(CrowdProcess(each, directory / f"crowd-{each.seed}.log")) for each in settings]
        for process, each in zip(found, settings, strict=True):
            assert process.hear() == {"clients": each.clients}
        yield Crowds(found)


def alike(settings: CrowdSettings, transports: tuple[str, ...]) -> list[CrowdSettings]:
    """A crowd for each transport, with seeds of their own."""
    return [replace(settings, transport=t, seed=settings.seed + i) for i, t in enumerate(transports)]


def held(pid: int) -> tuple[int, int, int]:
    """Memory of its own (bytes; blocks lie in shared memory), descriptors and threads of a process."""
    process = psutil.Process(pid)
    memory = process.memory_info()
    return memory.rss - memory.shared, process.num_fds(), process.num_threads()
