"""The caller's memory for a batch of blocks: either one buffer with the blocks side by side, or pieces of each.

Side by side is the fast case: neighbours move in one copy, and nothing is made per block in Python.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Pieces = list[memoryview]
"""One block's bytes: flat byte views, in order, together exactly the block's length."""

Bytes = NDArray[np.uint8]

Seeds = Callable[[], Sequence[int] | NDArray[np.uint64]]

Moved = Callable[[], NDArray[np.uint64]]
"""Waits for copies that were begun; the checksums of their blocks."""


def rest_of(buffers: Iterable[memoryview], count: int) -> list[memoryview]:
    """What is left of ``buffers`` after ``count`` bytes of them are done, as a call that moves several may leave it."""
    left: list[memoryview] = []
    for buffer in buffers:
        if count >= len(buffer):
            count -= len(buffer)
        else:
            left.append(buffer[count:])
            count = 0
    return left


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


class DeviceMemory(ABC):
    """A segment in memory of a device, as this process has it mapped: only `FarBlocks` are moved from and to it.

    It stays mapped for as long as anybody holds this object.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Its bytes."""

    @abstractmethod
    def address(self, device: int) -> int:
        """Where it begins for the device ``device``; raises UnavailableError when that cannot reach it."""

    def is_on(self, device: int) -> bool:
        """Whether it is the memory of ``device`` itself."""
        del device
        return False


class FarBlocks(Blocks, ABC):
    """Memory of blocks that the processor cannot reach, such as a GPU's: it moves its own bytes, and checks them.

    Only transports that read and write mapped memory are given such blocks: `Transport.reaches_far`.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select(self, blocks: Sequence[int]) -> "FarBlocks":
        """See `Blocks.select`."""

    @abstractmethod
    def joined(self, others: "Sequence[FarBlocks]") -> "FarBlocks":
        """These blocks and then ``others``, which are of the same memory."""

    def pieces(self, block: int) -> Pieces:
        """Never: there is nothing here that can be viewed."""
        raise TypeError(f"block {block} is not in host memory")

    def expect_load(self) -> None:
        """These blocks, or some of them, are about to be loaded: what can be got ready without their places, can be."""

    def expect_store(self) -> None:
        """The same for a store."""

    @abstractmethod
    def begin_load(
        self, memory: Bytes | DeviceMemory, starts: NDArray[np.uint64], seeds: Seeds, *, lasting: bool
    ) -> Moved:
        """Begin to copy the blocks that begin at ``starts`` in ``memory`` here.

        What is returned must be called: it waits for the copies, and answers the checksum of each block over what
        arrived.

        Args:
            memory: Host memory, or a device's, in which the blocks lie.
            starts: Byte offsets.
            seeds: Gives the seeds of the checksums; called when copies are under way.
            lasting: Whether ``memory`` is a mapping that will be used again, and so worth preparing.

        Raises:
            UnavailableError: The device refuses; nothing more is written then. The call that waits may raise it too.
        """

    @abstractmethod
    def begin_store(
        self, memory: Bytes | DeviceMemory, starts: NDArray[np.uint64], seeds: Seeds, *, lasting: bool
    ) -> Moved:
        """Begin to copy these blocks to ``starts`` in ``memory``; as `begin_load` else.

        What is returned must be called before ``memory`` is used or given back: it waits for the copies, and answers
        the checksum of each block as it was read here.
        """
