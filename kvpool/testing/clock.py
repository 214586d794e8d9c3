"""A clock that moves only when a test says so."""


class ManualClock:
    """Monotonic seconds under a test's control; pass it where kvpool takes a `kvpool.core.clock.Clock`.

    Args:
        start_s: Its first reading. Not 0, so that code which takes 0 for "never" is found out.
    """

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass.

        Raises:
            ValueError: ``seconds`` is negative; monotonic clocks do not run backwards.
        """
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} s: a monotonic clock does not run backwards")
        self._now_s += seconds
