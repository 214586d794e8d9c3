"""The scrub: goes through a node's blocks in the background, so that bad memory is found before anyone reads it.

Its priority is its pace. A thread with a low scheduling priority would wait for a core with the interpreter lock in its
hands; this one works in steps of a few milliseconds, rests between them, and makes way for requests.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvpool.core.clock import Clock
from kvpool.node.checking import Checked, Checks
from kvpool.ops.logging import get_logger

STEP_BYTES = 4 << 20
"""Checked at a time, or one block if that is larger."""

REST_S = 0.005
"""Least rest between steps, so that walking an empty segment is no work either."""

SUSPECTS_EVERY_S = 1.0
"""How often slots taken back by force are looked at, while nothing else is done."""

GIVE_WAY_S = 1.0
"""Longest that one step waits for the node to have nothing to serve: a node that never rests is scrubbed, slowly."""

VERIFY_S_MAX = 1.0

log = get_logger(__name__)


@dataclass(slots=True)
class ScrubProgress:
    """Passes ended, and how far the one under way has come, 0 to 1."""

    passes: int = 0
    progress: float = 0.0


class Scrubber:
    """Checks a store's blocks on a thread of its own.

    Args:
        checks: The store's.
        bytes_per_s: Its pace; 0 checks nothing but what the directory takes back by force.
        interval_s: From the start of one pass to the start of the next, if it ends before.
        wait_idle: Waits until the node serves nothing, at most so many seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        checks: Checks,
        bytes_per_s: int,
        interval_s: float,
        wait_idle: Callable[[float], object],
        clock: Clock = time.monotonic,
    ) -> None:
        self.progress = ScrubProgress()
        self.pages = checks.pages
        self._checks = checks
        self._bytes_per_s = bytes_per_s
        self._interval_s = interval_s
        self._wait_idle = wait_idle
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-scrub", daemon=True)

    def start(self) -> None:
        """Begin the first pass: what a restart has found again is checked at once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step under way, and wait for that."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            until_s = self._clock() + self._interval_s
            if self._bytes_per_s:
                self._pass()
            while not self._stopping.is_set() and self._clock() < until_s:
                self._checks.look_at_suspects()
                self._stopping.wait(min(SUSPECTS_EVERY_S, max(0.0, until_s - self._clock())))

    def _pass(self) -> None:
        started_s, checked, pages = self._clock(), Checked(0), self._checks.pages
        while checked.next_page < pages:
            self._wait_idle(GIVE_WAY_S)
            if self._stopping.is_set():
                return
            self._checks.look_at_suspects()
            step = self._checks.walk(checked.next_page, lambda step: step.size_bytes >= STEP_BYTES)
            checked += step
            self.progress.progress = checked.next_page / pages
            self._stopping.wait(max(REST_S, step.size_bytes / self._bytes_per_s))
        self.progress.passes += 1
        if checked.blocks:
            took_s = round(self._clock() - started_s, 3)
            log.info("scrubbed", blocks=checked.blocks, bytes=checked.size_bytes, bad=checked.bad, took_s=took_s)


def verify(tiers: Sequence[Checks], page: int, limit_s: float) -> tuple[Checked, float]:
    """Check blocks from ``page`` on as fast as their media allow, for about ``limit_s``; also the seconds it took.

    Pages are counted through all tiers.
    """
    started_s = time.monotonic()
    until_s = started_s + min(limit_s, VERIFY_S_MAX)
    checked, before = Checked(page), 0
    for checks in tiers:
        if before <= checked.next_page < before + checks.pages:
            found = checks.walk(checked.next_page - before, lambda _: time.monotonic() >= until_s)
            checked += replace(found, next_page=before + found.next_page)
        before += checks.pages
    return checked, time.monotonic() - started_s


def whole_progress(tiers: Sequence["Scrubber"]) -> ScrubProgress:
    """How far the scrubs of all tiers have come, by their pages."""
    pages = sum(scrubber.pages for scrubber in tiers)
    done = sum(scrubber.pages * scrubber.progress.progress for scrubber in tiers)
    return ScrubProgress(min(scrubber.progress.passes for scrubber in tiers), done / pages)
