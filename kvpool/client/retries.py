"""A retry budget: repeated calls are a small part of all calls, however many fail."""

import threading

SHARE = 0.1
"""Retries a call, over time."""

BURST = 10
"""Retries at hand after a quiet time, so that a lone failure in little traffic is repeated too."""


class RetryBudget:
    """A token bucket filled by calls and emptied by retries: never more than ``burst + share * calls``. Thread-safe.

    Args:
        share: Part of a token that each call brings.
        burst: Most tokens kept, and those at the start.

    Attributes:
        retries: Those that were allowed.
        denied: Those that were not.
    """

    def __init__(self, share: float = SHARE, burst: float = BURST) -> None:
        self._share = share
        self._burst = burst
        self._tokens = float(burst)
        self._lock = threading.Lock()
        self.retries = 0
        self.denied = 0

    def called(self) -> None:
        """A call was made for the first time."""
        with self._lock:
            self._tokens = min(self._burst, self._tokens + self._share)

    def allows(self) -> bool:
        """Whether a failed call may be repeated; a True is for one repetition."""
        with self._lock:
            if self._tokens < 1:
                self.denied += 1
                return False
            self._tokens -= 1
            self.retries += 1
            return True
