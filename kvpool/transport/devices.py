"""Devices whose memory a node can hold blocks in, by kind; adding one is one module and one line here.

Each module has `allocate`, for the node, and `attach`, for clients that reach the same memory from their own device.
Imports are lazy: nobody else needs what a device needs.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvpool.core.errors import SettingsError
from kvpool.transport.blocks import DeviceMemory

KINDS: dict[str, str] = {"cuda": "kvpool.gpu.device"}
"""Kind -> module."""

_DEVICE = re.compile(r"([a-z]+):(\d{1,3})")

Copy = tuple[int, memoryview]
"""A byte offset into a device's memory, and host memory of the same length."""


class OwnMemory(ABC):
    """Memory of a device that this process has allocated. Owns it until `close`; thread-safe.

    Attributes:
        handle: What another process on this host attaches it by.
        name: The device's, for people.
    """

    handle: bytes
    name: str

    @abstractmethod
    def buffer(self, size_bytes: int) -> memoryview:
        """Host memory that the device reads and writes fast; the caller's."""

    @abstractmethod
    def read(self, copies: Sequence[Copy]) -> None:
        """Copy from the device into host memory; raises OSError."""

    @abstractmethod
    def write(self, copies: Sequence[Copy]) -> None:
        """Copy from host memory to the device; raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""


def parse_device(device: str) -> tuple[str, int]:
    """Kind and number of a device such as ``cuda:0``; raises SettingsError."""
    match = _DEVICE.fullmatch(device)
    if match is None or match[1] not in KINDS:
        examples = ", ".join(f"{kind}:0" for kind in KINDS)
        raise SettingsError(f"device {device!r} is not known; write e.g. {examples}")
    return match[1], int(match[2])


def allocate(device: str, size_bytes: int) -> OwnMemory:
    """Memory of ``device``, zeroed.

    Raises:
        SettingsError: No such kind of device.
        UnavailableError: What it needs is not installed, or it cannot be used.
        CapacityError: It has not that much memory left, or there is no device of that number.
    """
    kind, number = parse_device(device)
    memory: OwnMemory = _module(kind).allocate(number, size_bytes)
    return memory


def attach(kind: str, handle: bytes, size_bytes: int) -> DeviceMemory:
    """The memory that another process on this host has allocated.

    Raises:
        UnavailableError: What the device needs is not installed, or it cannot be reached from here.
    """
    parse_device(f"{kind}:0")
    memory: DeviceMemory = _module(kind).attach(handle, size_bytes)
    return memory


def _module(kind: str) -> Any:  # noqa: ANN401 - a module
    return import_module(KINDS[kind])
