"""`tcp` and `unix`: block bytes in frames, scattered and gathered by the kernel straight between slots and buffers.

Two-sided: the node pins a slot while it sends it and receives written bytes itself, so a reader can never see a slot
change, and the checksum over the destination guards the way. Large batches are split over several streams.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvpool.core.checksum import block_seeds
from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ClosedError, KvpoolError, ProtocolError
from kvpool.core.limits import HASH_BYTES
from kvpool.transport.base import ReadBatch, ReadStatus, Transport, WriteBatch, WriteStatus
from kvpool.transport.copying import checksum
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import (
    PrepareReply,
    PrepareRequest,
    ReadReply,
    ReadRequest,
    Statuses,
    WriteRequest,
    pack,
    unpack,
)

STREAM_BYTES_MIN = 1 << 20
"""Less than this is not worth another stream."""

REQUEST_BYTES_MAX = 64 << 20
"""Bytes asked for in one frame, so that one request neither pins nor delays too much."""


class TcpTransport(Transport):
    """Framed connections to a node, over TCP or a Unix socket."""

    def __init__(self, uri: str, principal: str, incarnation: int, streams: int, timeout_s: float) -> None:
        self.name = uri.partition("://")[0]
        self._connections = ConnectionPool(uri, principal, incarnation)
        self._streams = streams
        self._workers = ThreadPoolExecutor(max(1, 4 * (streams - 1)), "kvpool-stream") if streams > 1 else None
        with self._connections.connection(timeout_s):
            pass  # the node answers

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`."""
        seeds = batch.seeds()

        def part(start: int, end: int) -> bytearray:
            return self._read_part(batch, seeds, start, end, deadline)

        return self._spread(len(batch.destinations), batch.block_bytes, part, ReadStatus.FAILED)

    def write(self, batch: WriteBatch, deadline: Deadline) -> bytearray:
        """See `Transport.write`."""

        def part(start: int, end: int) -> bytearray:
            return self._write_part(batch, start, end, deadline)

        return self._spread(len(batch.sources), batch.block_bytes, part, WriteStatus.FAILED)

    def close(self) -> None:
        """See `Transport.close`."""
        self._connections.close()
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)

    def _spread(self, count: int, block_bytes: int, part: Callable[[int, int], bytearray], failed: int) -> bytearray:
        """Run ``part`` over slices of ``range(count)``, on several streams when there is enough to move."""
        streams = min(self._streams, count, count * block_bytes // STREAM_BYTES_MIN)
        if streams <= 1 or self._workers is None:
            return _or_failed(part, 0, count, failed)
        bounds = [count * i // streams for i in range(streams + 1)]
        slices = list(pairwise(bounds))
        others = [self._workers.submit(_or_failed, part, start, end, failed) for start, end in slices[1:]]
        statuses = _or_failed(part, *slices[0], failed)
        for other in others:
            statuses += other.result()
        return statuses

    def _read_part(self, batch: ReadBatch, seeds: list[int], start: int, end: int, deadline: Deadline) -> bytearray:
        step = max(1, REQUEST_BYTES_MAX // batch.block_bytes)
        statuses = bytearray([ReadStatus.FAILED]) * (end - start)
        try:
            with self._connections.connection(deadline.left_s()) as connection:
                for first in range(start, end, step):
                    blocks = range(first, min(first + step, end))
                    _read_on(connection, batch, seeds, blocks, statuses, start, deadline)
        except ClosedError:
            raise
        except (KvpoolError, OSError):
            pass  # what had arrived is verified; the rest stays FAILED
        return statuses

    def _write_part(self, batch: WriteBatch, start: int, end: int, deadline: Deadline) -> bytearray:
        statuses = bytearray([WriteStatus.NO_SLOT]) * (end - start)
        step = max(1, REQUEST_BYTES_MAX // batch.block_bytes)
        with self._connections.connection(deadline.left_s()) as connection:
            request = PrepareRequest(batch.grant, start, end - start)
            prepared = connection.call(request, PrepareReply, deadline.left_s())
            slots = unpack("slots", prepared.slots, "<u4", end - start)
            generations = unpack("generations", prepared.generations, "<u8", end - start)
            ready = np.flatnonzero(slots != NO_SLOT)
            for first in range(0, len(ready), step):
                some = ready[first : first + step]
                done = _write_on(connection, batch, start, some, slots, generations, deadline)
                for i, status in zip(some.tolist(), done, strict=True):
                    statuses[i] = status
        return statuses


def _read_on(
    connection: Connection,
    batch: ReadBatch,
    seeds: list[int],
    blocks: range,
    statuses: bytearray,
    offset: int,
    deadline: Deadline,
) -> None:
    """Read ``blocks`` in one exchange, filling in statuses (from ``offset`` on) as blocks arrive."""
    some = slice(blocks.start, blocks.stop)
    request = ReadRequest(
        batch.segment_id, batch.slots[some].tobytes(), batch.generations[some].tobytes(), batch.block_bytes
    )
    reply, payload_bytes = connection.begin(request, ReadReply, deadline.left_s())
    present = unpack("present", reply.present, "u1", len(blocks)).tolist()
    if payload_bytes != sum(present) * batch.block_bytes:
        connection.close()
        raise ProtocolError(f"{connection.uri} sends {payload_bytes} bytes for {sum(present)} blocks")
    expected = batch.checksums[some].tolist()
    for i, here, wanted in zip(blocks, present, expected, strict=True):
        if not here:
            statuses[i - offset] = ReadStatus.GONE
            continue
        connection.take(batch.destinations[i])
        arrived = checksum(batch.destinations[i], seeds[i])
        statuses[i - offset] = ReadStatus.OK if arrived == wanted else ReadStatus.BAD


def _write_on(
    connection: Connection,
    batch: WriteBatch,
    start: int,
    some: NDArray[np.int64],
    slots: NDArray[np.uint32],
    generations: NDArray[np.uint64],
    deadline: Deadline,
) -> bytes:
    """Write and commit blocks ``start + some`` in one exchange."""
    part = batch.hashes[start * HASH_BYTES : (start + len(slots)) * HASH_BYTES]
    seeds = block_seeds(batch.namespace_seed, part, batch.shard, generations, batch.block_bytes)
    blocks = some.tolist()
    sources = [batch.sources[start + i] for i in blocks]
    request = WriteRequest(
        batch.segment_id,
        batch.reservation,
        slots[some].tobytes(),
        generations[some].tobytes(),
        pack([checksum(pieces, seeds[i]) for i, pieces in zip(blocks, sources, strict=True)], "<u8"),
    )
    payload = [piece for pieces in sources for piece in pieces]
    return connection.call(request, Statuses, deadline.left_s(), payload).statuses


def _or_failed(part: Callable[[int, int], bytearray], start: int, end: int, failed: int) -> bytearray:
    try:
        return part(start, end)
    except ClosedError:
        raise
    except (KvpoolError, OSError):
        return bytearray([failed]) * (end - start)
