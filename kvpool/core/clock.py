"""Time as the core sees it: a function that returns monotonic seconds. Wall-clock time is not used anywhere."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Monotonic seconds from an arbitrary origin. The shells pass ``time.monotonic``, tests pass a manual clock."""

FOREVER_US = 1 << 62
"""A moment no clock reaches: the hold of a hard pin."""


def microseconds(seconds: float) -> int:
    """Seconds as whole microseconds: the directory's unit, so that a time fits an integer column."""
    return int(seconds * 1_000_000)
