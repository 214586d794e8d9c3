"""A TCP proxy that does to connections what networks do: delay, a thin pipe, silence, slices, resets, half a message.

Place it between two real processes. Faults hold for the connections that are open and for those to come, each direction
on its own, until others are set.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Self

CHUNK_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: closing sends a reset


@dataclass(frozen=True, slots=True)
class Faults:
    """What one direction of the connections suffers.

    Attributes:
        latency_s: Each piece arrives so much later.
        bytes_per_s: Bandwidth of each connection; 0: no limit.
        slice_bytes: Longest piece passed on at a time; 0: as it comes.
        limit_bytes: The connection is reset after so many bytes; None: never.
        close_delay_s: The end of the stream arrives so much later.
        stalled: Nothing is passed on: the connection is open, and silent.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0
    limit_bytes: int | None = None
    close_delay_s: float = 0.0
    stalled: bool = False


NO_FAULTS = Faults()


class FaultProxy:
    """Passes connections on to one server. A context manager; runs on a thread of its own.

    Args:
        host: Of the server.
        port: Of the server.
        listen_host: Where to listen.
        listen_port: 0: any free port.

    Attributes:
        address: ``host:port`` that it listens on.
        connections: Accepted so far.
    """

    def __init__(self, host: str, port: int, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        self.address = f"{listen_host}:{listen_port}"
        self.connections = 0
        self._target = (host, port)
        self._listen = (listen_host, listen_port)
        self._faults = {"to_server": NO_FAULTS, "to_client": NO_FAULTS}
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool-fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.up()
        return self

    def __exit__(self, *_error: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def suffer(self, *, to_server: Faults = NO_FAULTS, to_client: Faults = NO_FAULTS) -> None:
        """From now on, these faults and no others."""
        self._call(self._suffer({"to_server": to_server, "to_client": to_client}))

    def down(self) -> None:
        """Refuse connections, and reset those that are open."""
        self._call(self._down())

    def up(self) -> None:
        """Accept connections, at the same address as before."""
        self._call(self._up())

    def reset(self) -> None:
        """Reset every connection; new ones are accepted."""
        self._call(self._reset())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _suffer(self, faults: dict[str, Faults]) -> None:
        async with self._changed:
            self._faults = faults
            self._changed.notify_all()

    async def _up(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, *self._listen, limit=CHUNK_BYTES)
            self._listen = self._server.sockets[0].getsockname()[:2]
            self.address = f"{self._listen[0]}:{self._listen[1]}"

    async def _down(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._reset()

    async def _reset(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _close(self) -> None:
        await self._down()
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.CancelledError), self._kept(writer):
            there, onwards = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
            with self._kept(onwards):
                ways = (self._pump("to_server", reader, onwards), self._pump("to_client", there, writer))
                await asyncio.gather(*ways)

    @contextlib.contextmanager
    def _kept(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        except BaseException:
            _reset(writer)
            raise
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(CHUNK_BYTES):
            while data:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._faults[way].stalled)
                    faults = self._faults[way]
                piece = data[: faults.slice_bytes or len(data)]
                if faults.limit_bytes is not None:
                    piece = piece[: faults.limit_bytes - passed]
                await asyncio.sleep(faults.latency_s + (len(piece) / faults.bytes_per_s if faults.bytes_per_s else 0))
                writer.write(piece)
                await writer.drain()
                passed, data = passed + len(piece), data[len(piece) :]
                if faults.limit_bytes is not None and passed >= faults.limit_bytes:
                    raise ConnectionResetError("as much as was to pass has passed")
        await asyncio.sleep(self._faults[way].close_delay_s)
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
