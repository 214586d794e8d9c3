"""`tcp`, `tls` and `unix`: block bytes in frames, scattered and gathered straight between slots and buffers.

Two-sided: the node pins a slot while it sends it and receives written bytes itself, so a reader can never see a slot
change, and the checksum over the destination guards the way. Large reads are split over several streams; large stores
are written in steps, several at a time, by the client.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import ClosedError, DeadlineError, KvpoolError, ProtocolError, StaleGrantError
from kvpool.ops.failpoints import failpoint
from kvpool.transport.base import ReadBatch, ReadStatus, Target, Transport, WriteBatch
from kvpool.transport.copying import GROUP_BYTES, checksum, checksums_side_by_side
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.streams import Streams
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import ReadReply, ReadRequest, WriteRequest, pack, unpack
from kvpool.transport.writing import Commit, write_grants

REQUEST_BYTES_MAX = 64 << 20
"""Bytes asked for in one frame, so that one request neither pins nor delays too much."""


class TcpTransport(Transport):
    """Framed connections to a node, over TCP, with TLS or without, or a Unix socket."""

    def __init__(self, target: Target) -> None:
        self.name = target.uri.partition("://")[0]
        self._connections = ConnectionPool(target.uri, target.principal, target.incarnation, target.peer)
        self._streams = Streams(target.streams)
        with self._connections.connection(target.timeout_s):
            pass  # the node answers

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`."""
        return read_framed(self._connections, self._streams, batch, REQUEST_BYTES_MAX, deadline)

    def write(self, batches: Iterable[WriteBatch], deadline: Deadline) -> list[bytearray]:
        """See `Transport.write`."""
        return write_grants(self._connections, batches, ready_frame, deadline)

    def close(self) -> None:
        """See `Transport.close`."""
        self._connections.close()
        self._streams.close()


def read_framed(
    connections: ConnectionPool, streams: Streams, batch: ReadBatch, request_bytes_max: int, deadline: Deadline
) -> bytearray:
    """Read the batch's blocks over framed connections; see `Transport.read`."""
    seeds = batch.seeds()

    def part(start: int, end: int) -> bytearray:
        return _read_part(connections, batch, seeds, start, end, request_bytes_max, deadline)

    return bytearray().join(streams.split(len(batch.destinations), batch.block_bytes, part))


def _read_part(
    connections: ConnectionPool,
    batch: ReadBatch,
    seeds: list[int],
    start: int,
    end: int,
    request_bytes_max: int,
    deadline: Deadline,
) -> bytearray:
    step = max(1, request_bytes_max // batch.block_bytes)
    statuses = bytearray([ReadStatus.FAILED]) * (end - start)
    try:
        with connections.connection(deadline.left_s()) as connection:
            for first in range(start, end, step):
                blocks = range(first, min(first + step, end))
                _read_on(connection, batch, seeds, blocks, statuses, start, deadline)
    except ClosedError:
        raise
    except StaleGrantError:
        return statuses.replace(bytes([ReadStatus.FAILED]), bytes([ReadStatus.REFUSED]))
    except DeadlineError:
        return statuses.replace(bytes([ReadStatus.FAILED]), bytes([ReadStatus.LATE]))
    except (KvpoolError, OSError):
        pass  # what had arrived is verified; the rest stays FAILED
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
        batch.segment_id,
        batch.slots[some].tobytes(),
        batch.generations[some].tobytes(),
        batch.block_bytes,
        batch.grant,
    )
    connection.post(request, deadline.left_s())
    reply, payload_bytes = connection.begin(ReadReply, deadline.left_s())
    present = unpack("present", reply.present, "u1", len(blocks))
    arriving = [blocks[i] for i in np.flatnonzero(present).tolist()]
    if payload_bytes != len(arriving) * batch.block_bytes:
        connection.close()
        raise ProtocolError(f"{connection.uri} sends {payload_bytes} bytes for {len(arriving)} blocks")
    for block in blocks:
        statuses[block - offset] = ReadStatus.GONE
    for block in arriving:
        statuses[block - offset] = ReadStatus.FAILED
    expected = batch.checksums.tolist()
    for taken, checksums in _take(connection, batch, seeds, arriving):
        failpoint("client.read.before_verify")
        for block, arrived in zip(taken, checksums, strict=True):
            statuses[block - offset] = ReadStatus.OK if arrived == expected[block] else ReadStatus.BAD


def _take(
    connection: Connection, batch: ReadBatch, seeds: list[int], blocks: list[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Receive blocks in their order, some at a time; which, and the checksums of what their destinations hold."""
    length, destinations = batch.block_bytes, batch.destinations
    step = max(1, GROUP_BYTES // length)
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step]
        part = destinations.select(some)
        if part.whole is not None:
            connection.take([part.whole.data])
            yield some, checksums_side_by_side(part.whole.data, length, [seeds[b] for b in some])
        else:
            pieces = [part.pieces(i) for i in range(len(some))]
            connection.take([piece for block in pieces for piece in block])
            yield some, [checksum(p, seeds[b]) for p, b in zip(pieces, some, strict=True)]


def ready_frame(
    batch: WriteBatch, blocks: list[int], slots: NDArray[np.uint32], generations: NDArray[np.uint64]
) -> Commit:
    """See `writing.Move`: the payload goes out straight from the caller's memory."""
    seeds, sources = batch.seeds(generations, blocks), batch.sources.select(blocks)
    if sources.whole is not None:
        payload = [sources.whole.data]
        checksums = checksums_side_by_side(payload[0], batch.block_bytes, seeds)
    else:
        pieces = [sources.pieces(i) for i in range(len(blocks))]
        payload = [piece for block in pieces for piece in block]
        checksums = [checksum(block, seed) for block, seed in zip(pieces, seeds, strict=True)]
    where = (slots.tobytes(), generations.tobytes(), pack(checksums, "<u8"))
    return lambda: (WriteRequest(batch.segment_id, batch.reservation, *where), payload)
