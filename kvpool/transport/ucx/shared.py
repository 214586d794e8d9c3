"""One UCX process and one region for all clients of this process that use the same devices: both cost something."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from kvpool.transport.deadline import Deadline
from kvpool.transport.ucx.arena import REGION_BYTES, Arena
from kvpool.transport.ucx.process import UcxProcess


@dataclass(slots=True)
class ClientSide:
    """What a process's clients share; ``users`` hold it."""

    arena: Arena
    process: UcxProcess
    users: int = 0


_shared: dict[str, ClientSide] = {}
"""By devices: as the host's devices are there once, so is who drives them for the clients of a process."""
_lock = threading.Lock()


def devices_for(host: str) -> str:
    """Devices for peers at ``host``: who works on loopback alone opens no port anywhere else."""
    if host == "localhost":
        return "lo"
    try:
        return "lo" if ip_address(host).is_loopback else ""
    except ValueError:
        return ""


def hold(devices: str, deadline: Deadline) -> tuple[ClientSide, Callable[[], None]]:
    """The clients' side for ``devices``, started; and what lets go of it. Raises as `UcxProcess.start`."""
    with _lock:
        side = _shared.get(devices)
        if side is None:
            arena = Arena()
            try:
                process = UcxProcess(arena.descriptor, arena.descriptor, REGION_BYTES, devices)
            except BaseException:
                arena.close()
                raise
            side = _shared[devices] = ClientSide(arena, process)
        side.users += 1
    try:
        side.process.start(deadline)
    except BaseException:
        _let_go(devices, side)
        raise
    return side, lambda: _let_go(devices, side)


def _let_go(devices: str, side: ClientSide) -> None:
    with _lock:
        side.users -= 1
        if side.users:
            return
        del _shared[devices]
    side.process.stop()
    side.arena.close()
