"""Spreads large transfers over several threads; small ones stay on the caller's."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TypeVar

Result = TypeVar("Result")

STREAM_BYTES_MIN = 1 << 20
"""Less than this is not worth another thread."""

CALLS_MAX = 4
"""Concurrent calls whose further streams find a thread waiting; beyond, they queue."""


class Streams:
    """Threads for the further streams of a client's or transport's calls.

    Args:
        count: Streams of one call, the caller's own thread included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._workers = ThreadPoolExecutor(count * CALLS_MAX, "kvpool-stream") if count > 1 else None

    def split(self, blocks: int, block_bytes: int, part: Callable[[int, int], Result]) -> list[Result]:
        """``part(first, end)`` over slices of ``range(blocks)``, in order; one slice where there is little to move."""
        streams = max(1, min(self.count, blocks, blocks * block_bytes // STREAM_BYTES_MIN))
        bounds = [blocks * i // streams for i in range(streams + 1)]
        return self.run([partial(part, first, end) for first, end in pairwise(bounds)])

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Make all calls side by side, the first on this thread; their results in order."""
        if len(calls) == 1 or self._workers is None:
            return [call() for call in calls]
        others = [self._workers.submit(call) for call in calls[1:]]
        first = calls[0]()
        return [first, *(other.result() for other in others)]

    def window(self, calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """Results of the calls, in order; the next ones are drawn from ``calls`` while up to ``count`` of them run."""
        pending: deque[Future[Result]] = deque()
        for call in calls:
            if self._workers is None:
                yield call()
                continue
            pending.append(self._workers.submit(call))
            if len(pending) == self.count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def close(self) -> None:
        """End the threads; calls that run finish."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
