"""Raw limits: the same blocks moved by the simplest means there are, without checks, names or a pool.

`shm`: NumPy copies between two mappings of shared memory. `tcp` and `unix`: a child process that answers each request,
16 bytes little-endian (operation u32 | blocks u32 | first block u64), on blocking sockets:

    get   the blocks' bytes, by sendmsg straight from the child's memory
    put   the blocks' bytes follow the request; the child receives them in place and answers with one byte
"""

import contextlib
import mmap
import queue
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.bench.measure import child, heard, say
from kvpool.core.errors import UnavailableError
from kvpool.transport.blocks import rest_of

_REQUEST = struct.Struct("<IIQ")
_IOV_MAX = 1024
_DONE = b"."

Block = NDArray[np.uint8]


class Op(IntEnum):
    """Which way blocks move, as the caller sees it."""

    GET = 0
    PUT = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call moves: blocks ``first``… of the other side, from or to ``buffers``.

    ``given`` is the same memory as the pool's client gets it: the list, or one array with the blocks side by side.
    """

    first: int
    buffers: list[Block]
    given: list[Block] | Block


class Limit(Protocol):
    """Moves batches. Safe to call from as many threads as it was made for."""

    def move(self, batch: Batch) -> None:
        """Move the batch's blocks."""


def shared_memory(size_bytes: int) -> Block:
    """Shared memory, every page touched."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    memory.fill(1)
    return memory


def blocks_of(memory: Block, block_bytes: int) -> list[Block]:
    """Its blocks, in order."""
    return [memory[start : start + block_bytes] for start in range(0, len(memory), block_bytes)]


def share_out(workers: Executor, count: int, streams: int, move: Callable[[int, int], None]) -> None:
    """Move ``count`` blocks in as many parts, given by start and end; the first part on the caller's own thread."""
    first, *others = pairwise(count * i // streams for i in range(streams + 1))
    moving = [workers.submit(move, *other) for other in others]
    move(*first)
    for other in moving:
        other.result()


class CopyLimit:
    """Copies block by block between the caller's buffers and shared memory of its own, on some threads a call."""

    def __init__(self, op: Op, blocks: int, block_bytes: int, threads: int, streams: int) -> None:
        self._op = op
        self._blocks = blocks_of(shared_memory(blocks * block_bytes), block_bytes)
        self._streams = streams
        self._workers = ThreadPoolExecutor(threads * streams, "limit-copy")

    def move(self, batch: Batch) -> None:
        """See `Limit.move`."""
        share_out(self._workers, len(batch.buffers), self._streams, partial(self._copy, batch))

    def close(self) -> None:
        """End its threads."""
        self._workers.shutdown()

    def _copy(self, batch: Batch, start: int, end: int) -> None:
        for i in range(start, end):
            buffer, block = batch.buffers[i], self._blocks[batch.first + i]
            if self._op is Op.GET:
                np.copyto(buffer, block)
            else:
                np.copyto(block, buffer)


class SocketLimit:
    """Moves each batch over several sockets at once, one request on each.

    Args:
        op: Which way.
        lanes: For each thread its connected sockets; owned by the caller.
    """

    def __init__(self, op: Op, lanes: Sequence[Sequence[socket.socket]]) -> None:
        self._op = op
        self._lanes: queue.SimpleQueue[Sequence[socket.socket]] = queue.SimpleQueue()
        for lane in lanes:
            self._lanes.put(lane)
        self._workers = ThreadPoolExecutor(sum(map(len, lanes)), "limit-stream")

    def move(self, batch: Batch) -> None:
        """See `Limit.move`."""
        lane = self._lanes.get()
        count = len(batch.buffers)
        bounds = list(pairwise(count * i // len(lane) for i in range(len(lane) + 1)))
        others = [
            self._workers.submit(self._exchange, sock, batch, start, end)
            for sock, (start, end) in zip(lane[1:], bounds[1:], strict=True)
        ]
        self._exchange(lane[0], batch, *bounds[0])
        for other in others:
            other.result()
        self._lanes.put(lane)

    def close(self) -> None:
        """End its threads."""
        self._workers.shutdown()

    def _exchange(self, sock: socket.socket, batch: Batch, start: int, end: int) -> None:
        views = [buffer.data for buffer in batch.buffers[start:end]]
        request = _REQUEST.pack(self._op, end - start, batch.first + start)
        if self._op is Op.GET:
            sock.sendall(request)
            _receive(sock, views)
        else:
            _send(sock, [memoryview(request), *views])
            _receive(sock, [memoryview(bytearray(1))])


@contextlib.contextmanager
def socket_limit(
    scheme: str, op: Op, blocks: int, block_bytes: int, threads: int, streams: int
) -> Iterator[SocketLimit]:
    """A `SocketLimit` and the child process it talks to; ``scheme`` is tcp or unix."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-"))
        server = stack.enter_context(child(serve_blocks, scheme, f"{folder}/limit.sock", blocks, block_bytes))
        address = heard(server)
        lanes = [[stack.enter_context(_connect(scheme, address)) for _ in range(streams)] for _ in range(threads)]
        limit = SocketLimit(op, lanes)
        stack.callback(limit.close)
        yield limit


def serve_blocks(scheme: str, path: str, blocks: int, block_bytes: int) -> None:
    """In a child: serve blocks until stdin ends; says where first."""
    memory = blocks_of(shared_memory(blocks * block_bytes), block_bytes)
    if scheme == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        address = path
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = str(listener.getsockname()[1])
    threading.Thread(target=_accept, args=(listener, memory), daemon=True).start()
    say(address)
    sys.stdin.read()


def _connect(scheme: str, address: str) -> socket.socket:
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return sock
    sock = socket.create_connection(("127.0.0.1", int(address)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _accept(listener: socket.socket, memory: list[Block]) -> None:
    while True:
        sock, _ = listener.accept()
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve, args=(sock, memory), daemon=True).start()


def _serve(sock: socket.socket, memory: list[Block]) -> None:
    with sock, contextlib.suppress(OSError, UnavailableError):  # the caller has closed
        request = bytearray(_REQUEST.size)
        while True:
            _receive(sock, [memoryview(request)])
            op, count, first = _REQUEST.unpack(request)
            views = [block.data for block in memory[first : first + count]]
            if op == Op.GET:
                _send(sock, views)
            else:
                _receive(sock, views)
                sock.sendall(_DONE)


def _send(sock: socket.socket, views: list[memoryview]) -> None:
    for start in range(0, len(views), _IOV_MAX):
        group = views[start : start + _IOV_MAX]
        while group:
            group = rest_of(group, sock.sendmsg(group))


def _receive(sock: socket.socket, views: list[memoryview]) -> None:
    for start in range(0, len(views), _IOV_MAX):
        group = views[start : start + _IOV_MAX]
        while group:
            count = sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
            if not count:
                raise UnavailableError("the other side of the raw sockets has closed")
            group = rest_of(group, count)
