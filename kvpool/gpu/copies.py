"""Lists of copies between host memory and a paged cache, and the copy engine that takes a whole list at a time."""

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import UnavailableError
from kvpool.gpu.layout import PageRuns

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies to make: where host memory and GPU memory begin, and how many bytes, one element a copy."""

    host: Addresses
    device: Addresses
    size_bytes: Addresses

    def part(self, first: int, end: int) -> "Copies":
        """The copies from ``first`` to before ``end``."""
        return Copies(self.host[first:end], self.device[first:end], self.size_bytes[first:end])

    def within(self, origin: int, piece_bytes: int) -> "Copies":
        """The same copies, none across a border of the pieces that host memory is page-locked in.

        Args:
            origin: Where the first piece begins.
            piece_bytes: Length of a piece.
        """
        into = (self.host - np.uint64(origin)) % np.uint64(piece_bytes)
        head = np.minimum(self.size_bytes, np.uint64(piece_bytes) - into)
        cut = head < self.size_bytes
        if not cut.any():
            return self
        rest = head[cut]
        return Copies(
            np.concatenate([self.host, self.host[cut] + rest]),
            np.concatenate([self.device, self.device[cut] + rest]),
            np.concatenate([head, self.size_bytes[cut] - rest]),
        ).within(origin, piece_bytes)


def page_copies(runs: PageRuns, address: int, ids: Addresses, host: Addresses) -> Copies:
    """A copy for each page of the blocks ``ids``, which lie whole at ``host``."""
    layers = len(runs.offsets)
    offsets = np.array(runs.offsets, np.uint64) + np.uint64(address)
    inside = np.arange(layers, dtype=np.uint64) * np.uint64(runs.size_bytes)
    device = (ids[:, None] * np.uint64(runs.stride) + offsets).reshape(-1)
    return Copies((host[:, None] + inside).reshape(-1), device, np.full(len(device), runs.size_bytes, np.uint64))


def packed_copies(block_bytes: int, address: int, host: Addresses) -> Copies:
    """Copies between blocks at ``host`` and as many side by side at ``address``; neighbours go together."""
    cuts = np.flatnonzero(np.diff(host) != np.uint64(block_bytes)) + 1
    first = np.concatenate([[0], cuts]).astype(np.uint64)
    count = np.concatenate([first[1:], [len(host)]]).astype(np.uint64) - first
    device = np.uint64(address) + first * np.uint64(block_bytes)
    return Copies(host[first.astype(np.intp)], device, count * np.uint64(block_bytes))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_STREAM_ORDER = 1
_OVERLAP_WITH_COMPUTE = 1


class CopyEngine:
    """The driver's call that takes a list of copies (CUDA 12.8 and later); CuPy has no name for it.

    Raises:
        UnavailableError: The driver is older.
    """

    def __init__(self) -> None:
        try:
            self._batch = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"the CUDA driver takes no lists of copies: {error}") from error
        self._attributes = _Attributes(_STREAM_ORDER, (0, 0), (0, 0), _OVERLAP_WITH_COMPUTE)

    def copy(self, destination: Addresses, source: Addresses, size_bytes: Addresses, stream: int) -> None:
        """Begin the copies on ``stream``; raises UnavailableError when the driver refuses them."""
        lists = [np.ascontiguousarray(a) for a in (destination, source, size_bytes)]
        failed, first = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._batch(
            *(ctypes.c_void_p(addresses.ctypes.data) for addresses in lists),
            ctypes.c_size_t(len(size_bytes)),
            ctypes.byref(self._attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        if code:
            raise UnavailableError(f"the CUDA driver refuses copy {failed.value} of {len(size_bytes)}: error {code}")
