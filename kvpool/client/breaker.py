"""A circuit breaker: after repeated failures a peer is left alone for a while, so that waiting for it costs nothing."""

import threading
from collections.abc import Callable

from kvpool.core.clock import Clock
from kvpool.transport.backoff import equal_jitter


class Breaker:
    """Opens after ``failures_max`` failures in a row; lets one call try again after a pause. Thread-safe.

    Args:
        clock: Monotonic seconds.
        failures_max: So many failures in a row open it.
        pause_s: Longest pause.
        jitter: Draws a pause of up to so many seconds: many clients of one dead peer must not try in step.
    """

    def __init__(
        self,
        clock: Clock,
        failures_max: int = 3,
        pause_s: float = 1.0,
        jitter: Callable[[float], float] = equal_jitter,
    ) -> None:
        self._clock = clock
        self._failures_max = failures_max
        self._pause_s = pause_s
        self._jitter = jitter
        self._failures = 0
        self._closed_until_s = 0.0
        self._trying = False
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Whether to call; a True after a pause is for one caller, the others wait for how it ends."""
        with self._lock:
            if self._failures < self._failures_max:
                return True
            now_s = self._clock()
            if now_s < self._closed_until_s:
                return False
            self._closed_until_s = now_s + self._jitter(self._pause_s)
            self._trying = True
            return True

    @property
    def trying(self) -> bool:
        """Whether the one call after a pause is under way."""
        return self._trying

    def succeeded(self) -> None:
        """The peer answered."""
        if self._failures:
            with self._lock:
                self._failures = 0
                self._trying = False

    def failed(self) -> None:
        """The peer did not answer."""
        with self._lock:
            self._failures += 1
            self._trying = False
            self._closed_until_s = self._clock() + self._jitter(self._pause_s)
