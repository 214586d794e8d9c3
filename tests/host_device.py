"""A device for machines without one: host memory that plays a GPU's, in real processes, and blocks in it.

Run as a module it is the `kvpool` command with the device ``host:0``. Its memory is a file that nobody else can name;
clients attach it by the node's process and descriptor, as they do a GPU's by a handle.
"""

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import xxhash

from kvpool.cli.main import main
from kvpool.core.errors import CapacityError, UnavailableError
from kvpool.transport import devices
from kvpool.transport.blocks import DeviceMemory, FarBlocks

KIND = "host"
BYTES_MAX = 1 << 30
BLOCK_BYTES = 8192
BROKEN = "HOST_DEVICE_BROKEN"
"""Names a file; while it is there, a device of a process with this variable refuses copies."""


class HostMemory(devices.OwnMemory):
    def __init__(self, number, size_bytes):
        if number or size_bytes > BYTES_MAX:
            raise CapacityError(f"host:{number} has no {size_bytes} bytes; choose a smaller --vram or another --device")
        self.name = f"{KIND}:{number}"
        self._descriptor = os.memfd_create("device")
        os.ftruncate(self._descriptor, size_bytes)
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, size_bytes), np.uint8)
        self.handle = f"/proc/{os.getpid()}/fd/{self._descriptor}".encode()

    def buffer(self, size_bytes):
        return memoryview(np.empty(size_bytes, np.uint8))

    def read(self, copies):
        for offset, view in copies:
            np.frombuffer(view, np.uint8)[:] = self._part(offset, view)

    def write(self, copies):
        for offset, view in copies:
            self._part(offset, view)[:] = np.frombuffer(view, np.uint8)

    def close(self):
        os.close(self._descriptor)

    def _part(self, offset, view):
        if Path(os.environ.get(BROKEN, "")).is_file():
            raise OSError("the device has fallen off the bus")
        return self._memory[offset : offset + len(view)]


class Attached(DeviceMemory):
    def __init__(self, handle, size_bytes):
        try:
            with Path(handle.decode()).open("r+b") as file:
                self.payload = np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint8)
        except OSError as error:
            raise UnavailableError(f"the device's memory cannot be attached: {error}") from error

    def __len__(self):
        return len(self.payload)

    def address(self, device):
        return self.payload.ctypes.data


class Device:
    """A memory that only its own blocks touch; blocks in ``damaged`` change on their way there."""

    def __init__(self, blocks):
        self.memory = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.damaged = set()
        self.refuses = False

    def blocks(self, ids):
        return DeviceBlocks(self, list(ids))


class DeviceBlocks(FarBlocks):
    def __init__(self, device, ids):
        super().__init__(BLOCK_BYTES)
        self.device, self.ids = device, ids

    def __len__(self):
        return len(self.ids)

    def select(self, blocks):
        return DeviceBlocks(self.device, [self.ids[block] for block in blocks])

    def joined(self, others):
        return DeviceBlocks(self.device, [i for blocks in (self, *others) for i in blocks.ids])

    def begin_load(self, memory, starts, seeds, *, lasting):
        memory = memory.payload if isinstance(memory, Attached) else memory
        for i, start in zip(self.ids, starts, strict=True):
            self._move(memory, int(start), i, into=True)
        return lambda: self._sums(seeds)

    def begin_store(self, memory, starts, seeds, *, lasting):
        memory = memory.payload if isinstance(memory, Attached) else memory
        for i, start in zip(self.ids, starts, strict=True):
            self._move(memory, int(start), i, into=False)
        return lambda: self._sums(seeds)

    def _move(self, memory, start, block, *, into):
        if self.device.refuses:
            raise UnavailableError("the device refuses")
        mine, theirs = self.device.memory[block], memory[start : start + BLOCK_BYTES]
        if into:
            mine[:] = theirs
            if block in self.device.damaged:
                mine[77] ^= 1
        else:
            theirs[:] = mine

    def _sums(self, seeds):
        sums = [
            xxhash.xxh3_64_intdigest(self.device.memory[i], seed) for i, seed in zip(self.ids, seeds(), strict=True)
        ]
        return np.array(sums, np.uint64)


def allocate(number, size_bytes):
    return HostMemory(number, size_bytes)


def attach(handle, size_bytes):
    return Attached(handle, size_bytes)


devices.KINDS[KIND] = "tests.host_device"

if __name__ == "__main__":
    sys.exit(main())
