"""Callers' buffers as flat byte views: NumPy arrays, torch CPU tensors, bytes, anything with the buffer protocol."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import InvalidBufferError
from kvpool.transport.blocks import Blocks, FarBlocks, Pieces

PIECES_MAX = 4_096
_FIELD_NAMES = re.compile(":[^:]*:")
Buffer = Any
"""One contiguous buffer, or a list or tuple of them that together hold a block."""
Buffers = Any
"""A list or tuple of `Buffer`, one a block; one contiguous buffer that holds all blocks side by side; or blocks of a
`kvpool.gpu.GpuCache`."""


def blocks_of(buffers: Buffers, block_bytes: int, *, writable: bool) -> Blocks:
    """The caller's buffers as the memory of blocks.

    Args:
        buffers: A list or tuple with a buffer, or a list of pieces, for each block; or one buffer with all blocks side
            by side, e.g. an array of shape (blocks, block_bytes): the fastest form; or blocks of a GPU's cache.
        block_bytes: Length of each block.
        writable: Whether they will be written.

    Raises:
        InvalidBufferError: A buffer of another length, read-only where it is to be written, or not contiguous.
    """
    if isinstance(buffers, FarBlocks):
        if buffers.block_bytes != block_bytes:
            raise InvalidBufferError(
                f"the cache's blocks have {buffers.block_bytes} bytes; the namespace's have {block_bytes} (block_bytes)"
            )
        return buffers
    if isinstance(buffers, list | tuple):
        return Blocks(block_bytes, pieces=_pieces(buffers, block_bytes, writable=writable))
    view = _flat(buffers, "buffers", writable=writable)
    if len(view) % block_bytes:
        raise InvalidBufferError(
            f"buffers has {len(view)} bytes, not a multiple of the namespace's {block_bytes} (block_bytes)"
        )
    return Blocks(block_bytes, whole=np.frombuffer(view, np.uint8))


def _pieces(buffers: Sequence[Buffer], block_bytes: int, *, writable: bool) -> list[Pieces]:
    blocks: list[Pieces] = []
    for i, buffer in enumerate(buffers):
        parts = buffer if isinstance(buffer, list | tuple) else (buffer,)
        if not 1 <= len(parts) <= PIECES_MAX:
            raise InvalidBufferError(f"buffers[{i}] has {len(parts)} pieces; give from 1 to {PIECES_MAX}")
        pieces = [_flat(part, f"buffers[{i}]", writable=writable) for part in parts]
        size_bytes = sum(map(len, pieces))
        if size_bytes != block_bytes:
            raise InvalidBufferError(
                f"buffers[{i}] has {size_bytes} bytes; the namespace's blocks have {block_bytes} (block_bytes)"
            )
        blocks.append(pieces)
    return blocks


def _flat(part: Buffer, name: str, *, writable: bool) -> memoryview:
    try:
        view = memoryview(part)
    except (TypeError, ValueError):  # ValueError: a dtype that the buffer protocol cannot describe, e.g. bfloat16
        view = _array_view(part, name) if isinstance(part, np.ndarray) else _tensor_view(part, name)
    if not view.c_contiguous:
        raise _scattered(name)
    if view.ndim != 1 or view.format != "B":
        view = _cast(view, name)
    if writable and view.readonly:
        raise InvalidBufferError(f"{name} is read-only; a load needs a writable buffer")
    return view


def _cast(view: memoryview, name: str) -> memoryview:
    if "O" in _FIELD_NAMES.sub("", view.format):
        raise InvalidBufferError(f"{name} holds Python objects, whose bytes are addresses; give an array of numbers")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _scattered(name: str) -> InvalidBufferError:
    return InvalidBufferError(f"{name} is not contiguous; give its contiguous pieces as a list")


def _array_view(part: NDArray[Any], name: str) -> memoryview:
    if not part.flags.c_contiguous:
        raise _scattered(name)
    return part.reshape(-1).view(np.uint8).data


def _tensor_view(part: Buffer, name: str) -> memoryview:
    """The bytes of a torch CPU tensor, whatever its dtype; torch itself is only used if the caller has it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(part, torch.Tensor):
        raise InvalidBufferError(f"{name} is {type(part).__name__}, which has no buffer; give an array or bytes")
    if part.device.type != "cpu":
        raise InvalidBufferError(f"{name} is on {part.device}; give CPU tensors, or GpuCache.blocks (kvpool.gpu)")
    if not part.is_contiguous():
        raise _scattered(name)
    return memoryview(part.detach().view(torch.uint8).reshape(-1).numpy())
