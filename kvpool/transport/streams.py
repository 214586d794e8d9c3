"""Spreads large transfers over several threads; small ones stay on the caller's."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TypeVar

from kvpool.core.errors import ClosedError

Result = TypeVar("Result")

STREAM_BYTES_MIN = 1 << 20
"""Less than this is not worth another thread."""

CALLS_MAX = 4
"""Concurrent calls whose further streams find a free thread; those of more calls run on the callers' own."""


class Streams:
    """Threads for the further streams of a client's or transport's calls.

    Args:
        count: Streams of one call, the caller's own thread included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = threading.Semaphore(count * CALLS_MAX)
        self._workers = ThreadPoolExecutor(count * CALLS_MAX, "kvpool-stream")

    def split(self, blocks: int, block_bytes: int, part: Callable[[int, int], Result]) -> list[Result]:
        """``part(first, end)`` over slices of ``range(blocks)``, in order; one slice where there is little to move."""
        streams = max(1, min(self.count, blocks, blocks * block_bytes // STREAM_BYTES_MIN))
        bounds = [blocks * i // streams for i in range(streams + 1)]
        return self.run([partial(part, first, end) for first, end in pairwise(bounds)])

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Make all calls side by side, the first on this thread; their results in order."""
        others = [self._start(call) for call in calls[1:]]
        first = calls[0]()
        return [first, *(other() for other in others)]

    def window(self, calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """Results of the calls, in order. Up to ``count`` run, while this thread draws the next one from ``calls``."""
        pending: deque[Callable[[], Result]] = deque()
        for call in calls:
            if len(pending) == self.count:
                yield pending.popleft()()
            pending.append(self._start(call))
        while pending:
            yield pending.popleft()()

    def close(self) -> None:
        """End the threads; calls that run finish, others end with ClosedError."""
        self._workers.shutdown(cancel_futures=True)

    def _start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Begin ``call`` on a free thread; what is returned waits for its result.

        Without a free thread the call is made when its result is asked for: a call never waits in a queue behind those
        of others, which may have all the time in the world.
        """
        if not self._free.acquire(blocking=False):
            return call
        try:
            future = self._workers.submit(call)
        except RuntimeError as error:  # what an executor says after its shutdown
            self._free.release()
            raise ClosedError("the client was closed") from error
        future.add_done_callback(lambda _: self._free.release())
        return partial(_result, future)


def _result(future: Future[Result]) -> Result:
    try:
        return future.result()
    except CancelledError as error:
        raise ClosedError("the client was closed") from error
