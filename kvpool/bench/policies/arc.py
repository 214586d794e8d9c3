"""ARC (FAST 2003): what was used once and what was used more, balanced by what comes back after it went."""

from collections import OrderedDict


class Arc:
    """ARC; names as in the paper: ``t1``, ``t2`` hold blocks, ``b1``, ``b2`` remember what left them."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._goal = 0.0
        self._t1: OrderedDict[bytes, None] = OrderedDict()
        self._t2: OrderedDict[bytes, None] = OrderedDict()
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, block: bytes) -> bool:
        return block in self._t1 or block in self._t2

    def use(self, block: bytes) -> None:
        """See `BlockCache.use`."""
        if block in self._t2:
            self._t2.move_to_end(block)
            return
        if block in self._t1:
            del self._t1[block]
        elif block in self._b1:
            self._goal = min(float(self._blocks), self._goal + max(1.0, len(self._b2) / len(self._b1)))
            self._replace(returned=False)
            del self._b1[block]
        elif block in self._b2:
            self._goal = max(0.0, self._goal - max(1.0, len(self._b1) / len(self._b2)))
            self._replace(returned=True)
            del self._b2[block]
        else:
            self._make_room()
            self._t1[block] = None
            return
        self._t2[block] = None

    def _make_room(self) -> None:
        once = len(self._t1) + len(self._b1)
        if once >= self._blocks:
            if len(self._t1) < self._blocks:
                self._b1.popitem(last=False)
                self._replace(returned=False)
            else:
                self._t1.popitem(last=False)
            return
        known = once + len(self._t2) + len(self._b2)
        if known >= 2 * self._blocks:
            self._b2.popitem(last=False)
        if known >= self._blocks:
            self._replace(returned=False)

    def _replace(self, *, returned: bool) -> None:
        """Move a block out; ``returned``: for one that was used more than once."""
        once = len(self._t1)
        if once and (once > self._goal or (returned and once == int(self._goal)) or not self._t2):
            block, _ = self._t1.popitem(last=False)
            self._b1[block] = None
        elif self._t2:
            block, _ = self._t2.popitem(last=False)
            self._b2[block] = None
