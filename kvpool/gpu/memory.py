"""A GPU's memory that several processes of a host reach: one allocates it, the others map it through CUDA IPC.

CUDA maps such memory to be written too, whoever maps it: see docs/design/gpu.md for who may.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import cupy
import numpy as np

from kvpool.core.errors import CapacityError, UnavailableError
from kvpool.core.units import format_size
from kvpool.transport.blocks import DeviceMemory
from kvpool.transport.devices import Copy, OwnMemory

GRANULE_BYTES = 2 << 20
"""Allocated in multiples of this: smaller allocations share their memory, and their handle, with others."""

IPC_HANDLE_BYTES = 64
"""CUDA's part of a handle; the GPU's UUID follows, since CUDA does not say which one a mapped memory is of."""

_TO_GPU = 1
_TO_HOST = 2


class CudaMemory(OwnMemory):
    """Memory of one GPU; see `OwnMemory`.

    Args:
        number: Of the GPU.
        size_bytes: Of the memory.

    Raises:
        CapacityError: No such GPU, or no room on it.
    """

    def __init__(self, number: int, size_bytes: int) -> None:
        count = cupy.cuda.runtime.getDeviceCount()
        if number >= count:
            raise CapacityError(f"there is no GPU cuda:{number}; this process sees cuda:0 to cuda:{count - 1}")
        self.name = f"cuda:{number}"
        self._number = number
        whole_bytes = -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES
        with cupy.cuda.Device(number):
            free_bytes, _ = cupy.cuda.runtime.memGetInfo()
            if whole_bytes > free_bytes:
                raise CapacityError(
                    f"a segment of {format_size(size_bytes)} does not fit {self.name}, which has "
                    f"{format_size(free_bytes)} free; choose a smaller --vram or another --device"
                )
            try:
                self._address: int = cupy.cuda.runtime.malloc(whole_bytes)
                cupy.cuda.runtime.memset(self._address, 0, whole_bytes)
                self.handle: bytes = cupy.cuda.runtime.ipcGetMemHandle(self._address) + _uuid(number)
                self._stream = cupy.cuda.Stream(non_blocking=True)
                cupy.cuda.runtime.deviceSynchronize()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise CapacityError(
                    f"{self.name} gave no {format_size(size_bytes)}: {error}; "
                    "choose a smaller --vram or another --device"
                ) from error
        self._lock = threading.Lock()
        self._closed = False

    def buffer(self, size_bytes: int) -> memoryview:
        """See `OwnMemory.buffer`: page-locked."""
        with cupy.cuda.Device(self._number):
            locked = cupy.cuda.alloc_pinned_memory(size_bytes)
        return np.frombuffer(locked, np.uint8, size_bytes).data

    def read(self, copies: Sequence[Copy]) -> None:
        """See `OwnMemory.read`."""
        self._copy(copies, _TO_HOST)

    def write(self, copies: Sequence[Copy]) -> None:
        """See `OwnMemory.write`."""
        self._copy(copies, _TO_GPU)

    def close(self) -> None:
        """See `OwnMemory.close`; those who have it mapped must not use it any more."""
        with self._lock, cupy.cuda.Device(self._number), suppress(cupy.cuda.runtime.CUDARuntimeError):
            self._closed = True
            cupy.cuda.runtime.free(self._address)

    def _copy(self, copies: Sequence[Copy], way: int) -> None:
        """Make copies, all of them begun before the first is waited for."""
        with self._lock, cupy.cuda.Device(self._number) as gpu:
            if self._closed:
                raise OSError(f"the memory on {self.name} was given back")
            try:
                gpu.use()  # makes its context this thread's
                for offset, view in copies:
                    host, here = np.frombuffer(view, np.uint8).ctypes.data, self._address + offset
                    to, source = (here, host) if way == _TO_GPU else (host, here)
                    cupy.cuda.runtime.memcpyAsync(to, source, len(view), way, self._stream.ptr)
                self._stream.synchronize()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise OSError(f"{self.name} refuses a copy: {error}") from error


class MappedMemory(DeviceMemory):
    """Another process's memory, mapped for each GPU of this process that uses it; see `DeviceMemory`. Thread-safe."""

    def __init__(self, handle: bytes, size_bytes: int) -> None:
        self._handle, self._uuid = handle[:IPC_HANDLE_BYTES], handle[IPC_HANDLE_BYTES:]
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._addresses: dict[int, int] = {}
        weakref.finalize(self, _unmap, self._addresses).atexit = False  # a process that ends unmaps all it has

    def __len__(self) -> int:
        """See `DeviceMemory`."""
        return self._size_bytes

    def address(self, device: int) -> int:
        """See `DeviceMemory.address`; maps the memory at the first call."""
        with self._lock:
            found = self._addresses.get(device)
            if found is None:
                found = self._addresses[device] = self._map(device)
            return found

    def is_on(self, device: int) -> bool:
        """See `DeviceMemory.is_on`."""
        return self._uuid == _uuid(device)

    def _map(self, device: int) -> int:
        with cupy.cuda.Device(device) as gpu:
            try:
                gpu.use()
                address: int = cupy.cuda.runtime.ipcOpenMemHandle(self._handle)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise UnavailableError(
                    f"GPU {device} cannot map the node's memory: {error}; this process must see the node's GPU, in the "
                    "same container or with its process names, and both GPUs must reach each other"
                ) from error
        return address


@cache
def _uuid(device: int) -> bytes:
    return bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"])


def _unmap(addresses: dict[int, int]) -> None:
    for device, address in addresses.items():
        with suppress(cupy.cuda.runtime.CUDARuntimeError), cupy.cuda.Device(device):
            cupy.cuda.runtime.ipcCloseMemHandle(address)
