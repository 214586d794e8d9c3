"""Latency histograms that are cheap enough for the hot path.

The Prometheus client's own histogram takes a lock a bucket, and more time than the directory needs for a short chain.
Here an observation is put on a pile, and piles are sorted into buckets many at a time.
"""

import threading
from collections import deque
from collections.abc import Iterable

import numpy as np

BUCKETS_S = (
    *(0.000_01, 0.000_025, 0.000_05),
    *(0.000_1, 0.000_25, 0.000_5),
    *(0.001, 0.002_5, 0.005),
    *(0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0),
    10.0,
)
"""Upper limits in seconds; one more bucket takes what is above."""

PILE = 512
"""Observations that are sorted at a time: about 30 µs."""

_LIMITS = np.array(BUCKETS_S)


class Latency:
    """How long one step takes: a histogram over `BUCKETS_S`. Thread-safe."""

    __slots__ = ("_counts", "_lock", "_pile", "_sum_s")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pile: deque[float] = deque()
        self._counts = np.zeros(len(BUCKETS_S) + 1, np.int64)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """It took so long once."""
        pile = self._pile
        pile.append(seconds)
        if len(pile) >= PILE:
            self._sort()

    def snapshot(self) -> tuple[list[int], float]:
        """Observations by bucket, and the sum of their seconds."""
        self._sort()
        with self._lock:
            return self._counts.tolist(), self._sum_s

    def _sort(self) -> None:
        with self._lock:
            # Only this takes from the pile: what others add meanwhile stays for the next time.
            seconds = np.array([self._pile.popleft() for _ in range(len(self._pile))])
            buckets = np.searchsorted(_LIMITS, seconds)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._sum_s += float(seconds.sum())


def latencies(steps: Iterable[str]) -> dict[str, Latency]:
    """A histogram for each step."""
    return {step: Latency() for step in steps}
