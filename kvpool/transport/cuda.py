"""`cuda`: a client with a GPU maps the GPU memory of a node on its host, and moves blocks from GPU to GPU.

As over `shm` the node is asked only to prepare and commit writes, and acceptance is the checksum over the destination,
computed there. Blocks in host memory, and what is on the node's disk, go over the node's Unix socket.
"""

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import VRAM
from kvpool.core.errors import KvpoolError, ProtocolError
from kvpool.transport.base import ReadBatch, Reading, Target, Transport, WriteBatch
from kvpool.transport.blocks import DeviceMemory, FarBlocks
from kvpool.transport.copying import begin_store_slots, fits
from kvpool.transport.deadline import Deadline
from kvpool.transport.devices import attach
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.shm import FETCHED_BYTES_MAX, begin_mapped
from kvpool.transport.streams import Streams
from kvpool.transport.tcp import read_framed, ready_frame
from kvpool.transport.wire.framed import Buffers
from kvpool.transport.wire.messages import CommitSlotsRequest, Message, pack
from kvpool.transport.writing import Commit, write_grants

HANDLE_BYTES_MAX = 4096

log = logging.getLogger("kvpool.transport")


class MapRequest(Message, frozen=True):
    """Ask a node, over its Unix socket, how its device's memory is mapped."""

    kind = 60


class MapReply(Message, frozen=True):
    """The segment, the kind of its device, and what others attach it by."""

    kind = 61
    segment_id: bytes
    device: str
    handle: bytes
    size_bytes: int


def _attach(uri: str, reply: MapReply) -> DeviceMemory:
    """The node's memory, mapped. Where that cannot be, the way that is taken instead is slower: say so."""
    try:
        return attach(reply.device, reply.handle, reply.size_bytes)
    except KvpoolError as error:
        log.warning("the GPU memory of %s cannot be mapped: %s", uri, error)
        raise


class CudaTransport(Transport):
    """A node's mapped GPU memory; ``cuda:///path`` is the node's Unix socket."""

    name = "cuda"
    reaches_far = frozenset({VRAM})

    def __init__(self, target: Target) -> None:
        uri, deadline = target.uri, Deadline(target.timeout_s)
        self._connections = ConnectionPool(f"unix://{target.place}", target.principal, target.incarnation)
        self._streams = Streams(target.streams)
        try:
            with self._connections.connection(target.timeout_s) as connection:
                reply = connection.call(MapRequest(), MapReply, deadline.left_s())
            if len(reply.handle) > HANDLE_BYTES_MAX or reply.size_bytes < 1:
                raise ProtocolError(f"{uri} offers {reply.size_bytes} bytes by {len(reply.handle)} bytes of a handle")
            self._segment_id = reply.segment_id
            self._memory = _attach(uri, reply)
        except BaseException:
            self.close()
            raise

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`; what is mapped takes the time of the copies themselves."""
        return self.begin_read(batch, deadline)()

    def begin_read(self, batch: ReadBatch, deadline: Deadline) -> Reading:
        """See `Transport.begin_read`."""
        if isinstance(batch.destinations, FarBlocks) and batch.segment_id == self._segment_id:
            return begin_mapped(self._memory, batch, self._streams)
        statuses = read_framed(self._connections, self._streams, batch, FETCHED_BYTES_MAX, deadline)
        return lambda: statuses

    def write(self, batches: Iterable[WriteBatch], deadline: Deadline) -> list[bytearray]:
        """See `Transport.write`."""
        return write_grants(self._connections, batches, self._move, deadline)

    def close(self) -> None:
        """See `Transport.close`; the memory is unmapped when the last copy from or to it has ended."""
        self._connections.close()
        self._streams.close()

    def _move(
        self, batch: WriteBatch, blocks: list[int], slots: NDArray[np.uint32], generations: NDArray[np.uint64]
    ) -> Commit:
        if not isinstance(batch.sources, FarBlocks):
            return ready_frame(batch, blocks, slots, generations)
        if batch.segment_id != self._segment_id or not fits(self._memory, slots, batch.block_bytes):
            raise ProtocolError("the node prepared slots outside its own segment")
        seeds = batch.seeds(generations, blocks)
        stored = begin_store_slots(self._memory, slots, batch.sources.select(blocks), seeds)

        def commit() -> tuple[Message, Buffers]:
            where = (slots.tobytes(), generations.tobytes(), pack(stored(), "<u8"))
            return CommitSlotsRequest(batch.segment_id, batch.reservation, *where), ()

        return commit
