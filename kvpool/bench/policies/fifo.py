"""SIEVE, S3-FIFO and 2Q: queues in order of arrival, and a second chance for what was used."""

from collections import OrderedDict

USES_MAX = 3
"""S3-FIFO counts with two bits."""

GHOST_TIMES = 2
"""2Q remembers blocks that left its window, so many times its capacity."""


class Sieve:
    """SIEVE (NSDI 2024): a hand moves from old to new, spares what was used since it passed, and takes the first else.

    Blocks that are spared keep their places: ``_passed`` are those behind the hand, ``_ahead`` those before it, with
    the new ones at the end; both in order of arrival.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._used: dict[bytes, bool] = {}
        self._ahead: OrderedDict[bytes, None] = OrderedDict()
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, block: bytes) -> bool:
        return block in self._used

    def use(self, block: bytes) -> None:
        """See `BlockCache.use`."""
        if block in self._used:
            self._used[block] = True
            return
        if len(self._used) >= self._blocks:
            self._evict()
        self._used[block] = False
        self._ahead[block] = None

    def _evict(self) -> None:
        while True:
            if not self._ahead:
                self._ahead, self._passed = self._passed, OrderedDict()
            block, _ = self._ahead.popitem(last=False)
            if not self._used[block]:
                del self._used[block]
                return
            self._used[block] = False
            self._passed[block] = None


class S3Fifo:
    """S3-FIFO (SOSP 2023): a small queue that lets through what was used, a main queue, and a ghost of the small one.

    Args:
        blocks: Capacity.
        small: Part of it that the small queue may take.
        promote: Uses since it came in that let a block through to the main queue.
    """

    def __init__(self, blocks: int, small: float, promote: int) -> None:
        self._blocks = blocks
        self._small_max = max(1, int(small * blocks))
        self._promote = promote
        self._uses: dict[bytes, int] = {}
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, block: bytes) -> bool:
        return block in self._uses

    def use(self, block: bytes) -> None:
        """See `BlockCache.use`."""
        if block in self._uses:
            self._uses[block] = min(USES_MAX, self._uses[block] + 1)
            return
        while len(self._uses) >= self._blocks:
            if len(self._small) >= self._small_max or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        self._uses[block] = 0
        if block in self._ghost:
            del self._ghost[block]
            self._main[block] = None
        else:
            self._small[block] = None

    def _evict_small(self) -> None:
        block, _ = self._small.popitem(last=False)
        if self._uses[block] >= self._promote:
            self._uses[block] = 0
            self._main[block] = None
            if len(self._main) > self._blocks - self._small_max:
                self._evict_main()
            return
        del self._uses[block]
        self._ghost[block] = None
        if len(self._ghost) > self._blocks - self._small_max:
            self._ghost.popitem(last=False)

    def _evict_main(self) -> None:
        while True:
            block, _ = self._main.popitem(last=False)
            if not self._uses[block]:
                del self._uses[block]
                return
            self._uses[block] -= 1
            self._main[block] = None


class TwoQueues:
    """2Q (VLDB 1994): a window in order of arrival, LRU for what comes back after it left the window."""

    def __init__(self, blocks: int, window: float) -> None:
        self._blocks = blocks
        self._window_max = max(1, int(window * blocks))
        self._window: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, block: bytes) -> bool:
        return block in self._window or block in self._main

    def use(self, block: bytes) -> None:
        """See `BlockCache.use`."""
        if block in self._window:
            return
        if block in self._main:
            self._main.move_to_end(block)
            return
        if len(self._window) + len(self._main) >= self._blocks:
            self._evict()
        if block in self._ghost:
            del self._ghost[block]
            self._main[block] = None
        else:
            self._window[block] = None

    def _evict(self) -> None:
        if len(self._window) <= self._window_max and self._main:
            self._main.popitem(last=False)
            return
        block, _ = self._window.popitem(last=False)
        self._ghost[block] = None
        if len(self._ghost) > GHOST_TIMES * self._blocks:
            self._ghost.popitem(last=False)
