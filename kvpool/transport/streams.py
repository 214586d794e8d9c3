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
        self._workers = ThreadPoolExecutor(count * CALLS_MAX, "kvpool-stream")

    def split(self, blocks: int, block_bytes: int, part: Callable[[int, int], Result]) -> list[Result]:
        """``part(first, end)`` over slices of ``range(blocks)``, in order; one slice where there is little to move."""
        streams = max(1, min(self.count, blocks, blocks * block_bytes // STREAM_BYTES_MIN))
        bounds = [blocks * i // streams for i in range(streams + 1)]
        return self.run([partial(part, first, end) for first, end in pairwise(bounds)])

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Make all calls side by side, the first on this thread; their results in order."""
        others = [self._workers.submit(call) for call in calls[1:]]
        first = calls[0]()
        return [first, *(other.result() for other in others)]

    def ahead(self, calls: Sequence[Callable[[], Result]]) -> Iterator[Result]:
        """Results of the calls, in order; each is made while the caller works on the result before it."""
        if len(calls) == 1:
            yield calls[0]()
            return
        following = self._workers.submit(calls[0])
        for call in calls[1:]:
            current, following = following, self._workers.submit(call)
            yield current.result()
        yield following.result()

    def window(self, calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """Results of the calls, in order. Up to ``count`` run, while this thread draws the next one from ``calls``."""
        pending: deque[Future[Result]] = deque()
        for call in calls:
            if len(pending) == self.count:
                yield pending.popleft().result()
            pending.append(self._workers.submit(call))
        while pending:
            yield pending.popleft().result()

    def close(self) -> None:
        """End the threads; calls that run finish."""
        self._workers.shutdown(cancel_futures=True)
