"""CUDA GPUs as devices of `kvpool.transport.devices`. Importing this needs neither CUDA nor CuPy."""

from typing import TYPE_CHECKING

from kvpool.gpu.need import require_gpu

if TYPE_CHECKING:
    from kvpool.gpu.memory import CudaMemory, MappedMemory


def allocate(number: int, size_bytes: int) -> "CudaMemory":
    """See `kvpool.transport.devices.allocate`."""
    require_gpu()
    from kvpool.gpu.memory import CudaMemory  # noqa: PLC0415 - needs CuPy

    return CudaMemory(number, size_bytes)


def attach(handle: bytes, size_bytes: int) -> "MappedMemory":
    """See `kvpool.transport.devices.attach`; maps it for the current GPU, to know that it can be."""
    cupy = require_gpu()
    from kvpool.gpu.memory import MappedMemory  # noqa: PLC0415 - needs CuPy

    memory = MappedMemory(handle, size_bytes)
    memory.address(cupy.cuda.Device().id)
    return memory
