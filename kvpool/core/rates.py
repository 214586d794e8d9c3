"""How often something may happen: a bucket of tokens that fills at a steady rate."""

from kvpool.core.clock import Clock

BURST_S = 1.0
"""A bucket that was left alone holds the tokens of so many seconds, and one at least."""


class TokenBucket:
    """Tokens that come at ``rate_per_s``, counted when they are asked for.

    Args:
        rate_per_s: Above 0.
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_counted_at_s", "_rate_per_s", "_size", "_tokens")

    def __init__(self, rate_per_s: float, clock: Clock) -> None:
        self._rate_per_s = rate_per_s
        self._size = max(1.0, rate_per_s * BURST_S)
        self._tokens = self._size
        self._clock = clock
        self._counted_at_s = clock()

    @property
    def whole(self) -> int:
        """Tokens there are; below 0 by so many as were taken in advance."""
        now_s = self._clock()
        self._tokens = min(self._size, self._tokens + (now_s - self._counted_at_s) * self._rate_per_s)
        self._counted_at_s = now_s
        return int(self._tokens // 1)

    def take(self, tokens: int = 1, *, in_advance: bool = False) -> bool:
        """Take tokens if they are there; ``in_advance`` also what will come within the time that fills the bucket."""
        if self.whole + (int(self._size) if in_advance else 0) < tokens:
            return False
        self._tokens -= tokens
        return True
