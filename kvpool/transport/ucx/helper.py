"""The UCX process beside a client or a node: maps one region of memory, serves reads of it, and reads others' regions.

UCX ends the process it runs in when a reader goes away at the wrong moment (docs/design/ucx.md), and its calls know no
deadline. So neither an engine nor a node calls it: they ask this process, over a Unix socket that only they know. It
holds nothing but the mapping, and ends with its parent.
"""

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvpool.core.errors import ProtocolError
from kvpool.core.principals import Principal
from kvpool.ops.logging import configure
from kvpool.ops.settings import LogSettings
from kvpool.transport.ucx.messages import (
    ForgetRequest,
    PeerReply,
    PeerRequest,
    Region,
    RegionRequest,
    TransferReply,
    TransferRequest,
)
from kvpool.transport.ucx.nixl import Agent, Memory
from kvpool.transport.ucx.said import UcxLog, why_useless
from kvpool.transport.wire.messages import Done, Message, unpack
from kvpool.transport.wire.payload import Payload
from kvpool.transport.wire.server import FramedServer, Identity, Reply

CONNECTIONS_MAX = 256

READY = b"ready"
"""What it says once it serves; anything else is why it does not."""


class HelperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent tells it, as JSON.

    Attributes:
        name: The agent's name.
        socket: Where to listen.
        incarnation: What to say when greeted.
        descriptor: The memory, to read and write.
        exported_descriptor: The same memory as others may see it.
        size_bytes: Its size.
        devices: See `Agent`.
    """

    name: str
    socket: str
    incarnation: int
    descriptor: int
    exported_descriptor: int
    size_bytes: int
    devices: str


class _Session:
    """One of the parent's connections; each carries one transfer at a time."""

    def __init__(self, agent: Agent, ucx_log: UcxLog) -> None:
        self._agent = agent
        self._log = ucx_log
        self._handlers: dict[type[Message], Callable[[Any], Message]] = {
            RegionRequest: lambda _: self._agent.region,
            PeerRequest: self._meet,
            ForgetRequest: self._forget,
            TransferRequest: self._transfer,
        }

    def greet(self, principal: Principal) -> None:
        """See `Session.greet`."""

    def handle(self, request: Message, payload: Payload) -> Reply:
        """See `Session.handle`."""
        del payload
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"{type(request).__name__} is not for a UCX process")
        return Reply(handler(request))

    def closed(self) -> None:
        """See `Session.closed`."""

    def _meet(self, request: PeerRequest) -> Message:
        number = self._agent.add_peer(Region(request.agent, request.address, request.size_bytes))
        return PeerReply(number, self._log.carrier())

    def _forget(self, request: ForgetRequest) -> Message:
        self._agent.forget_peer(request.peer)
        return Done(0)

    def _transfer(self, request: TransferRequest) -> Message:
        count = len(request.ours) // 4
        ours, theirs = unpack("ours", request.ours, "<u4", count), unpack("theirs", request.theirs, "<u4", count)
        self._agent.read(request.peer, request.pages_each, ours, theirs)
        return TransferReply(self._log.carrier())


def main() -> None:
    """Serve until the parent closes standard input, as its end does too."""
    settings = msgspec.json.decode(sys.argv[1], type=HelperSettings)
    configure(LogSettings())
    ucx_log = UcxLog()
    local = _map(settings.descriptor, settings.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    exported = local
    if settings.exported_descriptor != settings.descriptor:
        # Who can read a region over UCX could write it too, but for this.
        exported = _map(settings.exported_descriptor, settings.size_bytes, mmap.PROT_READ)
    agent = _start(settings, exported, local, ucx_log)
    server = FramedServer(
        Identity("ucx", settings.incarnation), lambda _number, _local: _Session(agent, ucx_log), CONNECTIONS_MAX
    )
    server.listen_unix(Path(settings.socket))
    server.start()
    _tell(READY)
    sys.stdin.buffer.read()
    os._exit(0)  # transfers under way end with the process: nothing they could still do is wanted


def _start(settings: HelperSettings, exported: Memory, local: Memory, ucx_log: UcxLog) -> Agent:
    """The agent. Where UCX can reach nobody, the parent is told why, and the process ends."""
    try:
        return Agent(settings.name, exported, local, settings.devices, ucx_log.read)
    except Exception as error:  # noqa: BLE001 - what NIXL raises has no common base
        _tell(why_useless(ucx_log.read(), str(error), os.environ).encode())
        sys.exit(1)


def _tell(line: bytes) -> None:
    sys.stdout.buffer.write(line.replace(b"\n", b" ") + b"\n")
    sys.stdout.buffer.flush()


def _map(descriptor: int, size_bytes: int, protection: int) -> Memory:
    return np.frombuffer(mmap.mmap(descriptor, size_bytes, prot=protection), np.uint8)


if __name__ == "__main__":
    main()
