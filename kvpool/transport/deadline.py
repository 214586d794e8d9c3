"""A call's remaining time, shared by everything the call does."""

import time

from kvpool.core.errors import DeadlineError


class Deadline:
    """Ends ``timeout_s`` seconds after it was made."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def rest_s(self) -> float:
        """Seconds left, or zero."""
        return max(0.0, self._end_s - time.monotonic())

    def left_s(self) -> float:
        """Seconds left; raises DeadlineError when there are none."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"the call's {self.timeout_s:g} s are over")
        return left_s

    def part(self, share: float) -> "Deadline":
        """A deadline of its own after ``share`` of what is left; raises DeadlineError when nothing is."""
        return Deadline(self.left_s() * share)
