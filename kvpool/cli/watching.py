"""Looking at a pool again and again: one frame after the other, with what happened in between."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.cli.rates import Rates, rates_between
from kvpool.core.errors import UsageError
from kvpool.core.units import parse_duration

if TYPE_CHECKING:
    from kvpool.client import Client, PoolStatus

INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 3600.0

Pause = Callable[[float], bool]
"""Waits so many seconds; False when the user has had enough."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A pool, and its rates since the frame before."""

    status: "PoolStatus"
    rates: Rates


def parse_interval(text: str) -> float:
    """Seconds between two frames; raises UsageError."""
    interval_s = parse_duration(text)
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise UsageError(f"--interval is {text}; give from {INTERVAL_S_MIN:g}s to {INTERVAL_S_MAX:g}s")
    return interval_s


def frames(pool: "Client", interval_s: float, count: int | None, pause: Pause) -> Iterator[Frame]:
    """``count`` frames, or one after the other until ``pause`` says no; the first is since the service's start.

    Raises:
        UnavailableError: The pool cannot be reached.
    """
    before = None
    given = 0
    while True:
        began_s = time.monotonic()
        status = pool.status()
        yield Frame(status, rates_between(before, status))
        before, given = status, given + 1
        if given == count or not pause(max(0.0, began_s + interval_s - time.monotonic())):
            return


def sleep(seconds: float) -> bool:
    """A `Pause` that nothing but a signal ends."""
    time.sleep(seconds)
    return True


@contextmanager
def keys() -> Iterator[Pause]:
    """A `Pause` that ends early, and for good, when q is pressed; without a terminal to press it on, `sleep`."""
    try:
        import termios  # noqa: PLC0415 - not everywhere
        import tty  # noqa: PLC0415

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):
        yield sleep
        return
    try:
        tty.setcbreak(descriptor)
        yield lambda seconds: _not_quit(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _not_quit(descriptor: int, seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor], [], [], left_s)
        if ready:
            pressed = os.read(descriptor, 64)
            if not pressed or b"q" in pressed.lower():
                return False
    return True
