"""The caller's memory for a batch of blocks: either one buffer with the blocks side by side, or pieces of each.

Side by side is the fast case: neighbours move in one copy, and nothing is made per block in Python.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pieces = list[memoryview]
"""One block's bytes: flat byte views, in order, together exactly the block's length."""

Bytes = NDArray[np.uint8]


class Blocks:
    """Memory of ``len(self)`` blocks of ``block_bytes`` each. It is the caller's; nothing here keeps or frees it."""

    __slots__ = ("_pieces", "block_bytes", "whole")

    def __init__(self, block_bytes: int, *, whole: Bytes | None = None, pieces: Sequence[Pieces] = ()) -> None:
        self.block_bytes = block_bytes
        self.whole = whole
        """All blocks side by side, or None when they are given in pieces."""
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces) if self.whole is None else len(self.whole) // self.block_bytes

    def pieces(self, block: int) -> Pieces:
        """The pieces of one block."""
        if self.whole is None:
            return self._pieces[block]
        start = block * self.block_bytes
        return [self.whole[start : start + self.block_bytes].data]

    def select(self, blocks: Sequence[int]) -> "Blocks":
        """The memory of some of the blocks, in ascending order; still side by side if they were neighbours."""
        first, last = blocks[0], blocks[-1]
        if last - first + 1 != len(blocks):
            return Blocks(self.block_bytes, pieces=[self.pieces(block) for block in blocks])
        if self.whole is None:
            return Blocks(self.block_bytes, pieces=self._pieces[first : last + 1])
        return Blocks(self.block_bytes, whole=self.whole[first * self.block_bytes : (last + 1) * self.block_bytes])
