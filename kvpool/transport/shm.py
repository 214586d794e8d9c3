"""`shm`: the client maps the node's payload segment and copies; the node is asked only to prepare and commit writes.

Reads go through a read-only mapping and cost no system call and no server work. A reused or half-written slot cannot
pass: acceptance is the checksum over the destination. What is no host memory (a disk's, a GPU's) is read and written
over the socket, and so is all that the node does not let this client map. Prepared slots belong to the connection that
prepared them; the node takes them back when it closes.
"""

import logging
import mmap
import os
import threading
from collections.abc import Iterable
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import SHM
from kvpool.core.errors import ClosedError, KvpoolError, ProtocolError, StaleGrantError, UnavailableError
from kvpool.ops.failpoints import failpoint
from kvpool.transport.base import OnDiskError, ReadBatch, Reading, ReadStatus, Target, Transport, WriteBatch, verdicts
from kvpool.transport.blocks import Bytes, DeviceMemory, FarBlocks, Moved
from kvpool.transport.copying import begin_store_slots, fits, load_slots, starts_of
from kvpool.transport.deadline import Deadline
from kvpool.transport.once import OpenOnce
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.populate import Populator
from kvpool.transport.streams import Streams
from kvpool.transport.tcp import read_framed, ready_frame
from kvpool.transport.wire.framed import Buffers
from kvpool.transport.wire.messages import (
    NOT_ALLOWED,
    NOT_MAPPED,
    AttachReply,
    AttachRequest,
    CommitSlotsRequest,
    Message,
    pack,
)
from kvpool.transport.writing import Commit, write_grants

FETCHED_BYTES_MAX = 8 << 20
"""Bytes of one read of what the node must fetch first: while they are sent, another stream's are read."""

FRAMES = "unix"
"""What the transport is called when the node does not let it map anything."""

log = logging.getLogger("kvpool.transport")


class _Mapping:
    """One segment's payload, mapped; the writable view is mapped when first needed."""

    def __init__(self, read_descriptor: int, write_descriptor: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._write_descriptor = write_descriptor
        self._lock = threading.Lock()
        self._writable: Bytes | None = None
        self._closed = False
        try:
            self.readable: Bytes = np.frombuffer(mmap.mmap(read_descriptor, size_bytes, prot=mmap.PROT_READ), np.uint8)
        except (OSError, ValueError) as error:
            os.close(write_descriptor)
            raise UnavailableError(f"the segment of {size_bytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(read_descriptor)
        self._populators = [Populator(self.readable, writable=False)]

    def writable(self) -> Bytes:
        """The segment, to write prepared slots only."""
        with self._lock:
            if self._closed:
                raise ClosedError("the transport was closed")
            if self._writable is None:
                self._writable = np.frombuffer(mmap.mmap(self._write_descriptor, self.size_bytes), np.uint8)
                self._populators.append(Populator(self._writable, writable=True))
            return self._writable

    def close(self) -> None:
        """Drop the mappings; memory goes when the last view of a running copy does."""
        with self._lock:
            self._closed = True
            os.close(self._write_descriptor)
            self._writable = None
        for populator in self._populators:
            populator.stop()


def begin_mapped(payload: Bytes | DeviceMemory, batch: ReadBatch, streams: Streams) -> Reading:
    """Begin to copy the batch's blocks out of a mapped segment; those in host memory are copied then."""
    slots, destinations = batch.slots, batch.destinations
    if not fits(payload, slots, batch.block_bytes):
        return _known(ReadStatus.BAD, batch)
    if isinstance(destinations, FarBlocks):
        moved = destinations.begin_load(payload, starts_of(slots), batch.seed_array, lasting=True)
        return partial(_arrived, batch, moved)
    assert not isinstance(payload, DeviceMemory), "only far blocks are moved from a device"
    seeds = batch.seeds()

    def part(first: int, end: int) -> list[int]:
        return load_slots(payload, slots[first:end], destinations.select(range(first, end)), seeds[first:end])

    found = list(chain.from_iterable(streams.split(len(destinations), batch.block_bytes, part)))
    failpoint("client.read.before_verify")
    statuses = verdicts(found, batch.checksums.tolist())
    return lambda: statuses


def _arrived(batch: ReadBatch, moved: Moved) -> bytearray:
    found = moved()
    failpoint("client.read.before_verify")
    return bytearray((found != batch.checksums).astype(np.uint8) * np.uint8(ReadStatus.BAD))


def _known(status: ReadStatus, batch: ReadBatch) -> Reading:
    """A read that came to nothing before it began."""
    statuses = bytearray([status]) * len(batch.destinations)
    return lambda: statuses


class ShmTransport(Transport):
    """Mapped shared memory of a node on this host, reached through its Unix socket (``shm:///path``)."""

    name = "shm"
    reaches_far = frozenset({SHM})

    def __init__(self, target: Target) -> None:
        self._connections = ConnectionPool(f"unix://{target.place}", target.principal, target.incarnation)
        self._streams = Streams(target.streams)
        self._mappings: OpenOnce[bytes, _Mapping] = OpenOnce("the transport", _Mapping.close)
        self._not_mapped: set[bytes] = set()
        with self._connections.connection(target.timeout_s):
            pass  # the node is on this host and answers

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`; the time it takes is bounded by the copies themselves, but for what is not mapped."""
        return self.begin_read(batch, deadline)()

    def begin_read(self, batch: ReadBatch, deadline: Deadline) -> Reading:
        """See `Transport.begin_read`."""
        try:
            mapping = self._mapping(batch.segment_id, batch.grant, deadline)
        except ClosedError:
            raise
        except StaleGrantError:
            return _known(ReadStatus.REFUSED, batch)
        except (KvpoolError, OSError):
            return _known(ReadStatus.FAILED, batch)
        if mapping is None and isinstance(batch.destinations, FarBlocks):
            return _known(ReadStatus.FAILED, batch)  # the next read goes through host memory
        if mapping is None:
            statuses = read_framed(self._connections, self._streams, batch, FETCHED_BYTES_MAX, deadline)
            return lambda: statuses
        return begin_mapped(mapping.readable, batch, self._streams)

    def write(self, batches: Iterable[WriteBatch], deadline: Deadline) -> list[bytearray]:
        """See `Transport.write`."""

        def move(
            batch: WriteBatch, blocks: list[int], slots: NDArray[np.uint32], generations: NDArray[np.uint64]
        ) -> Commit:
            mapping = self._mapping(batch.segment_id, batch.grant, deadline)
            if mapping is None and isinstance(batch.sources, FarBlocks):
                raise UnavailableError("the node's memory may not be mapped; the next write goes through host memory")
            if mapping is None:
                return ready_frame(batch, blocks, slots, generations)
            payload = mapping.writable()
            if not fits(payload, slots, batch.block_bytes):
                raise ProtocolError("the node prepared slots outside its own segment")
            seeds = batch.seeds(generations, blocks)
            stored = begin_store_slots(payload, slots, batch.sources.select(blocks), seeds)

            def commit() -> tuple[Message, Buffers]:
                where = (slots.tobytes(), generations.tobytes(), pack(stored(), "<u8"))
                return CommitSlotsRequest(batch.segment_id, batch.reservation, *where), ()

            return commit

        return write_grants(self._connections, batches, move, deadline)

    def close(self) -> None:
        """See `Transport.close`."""
        self._connections.close()
        self._streams.close()
        self._mappings.close()

    def _mapping(self, segment_id: bytes, grant: bytes, deadline: Deadline) -> _Mapping | None:
        """The segment's mapping; None when it is no host memory, or may not be mapped."""
        if segment_id in self._not_mapped:
            return None
        try:
            return self._mappings.get(segment_id, partial(self._attach, segment_id, grant, deadline), deadline)
        except OnDiskError:
            self._not_mapped.add(segment_id)
            return None

    def _attach(self, segment_id: bytes, grant: bytes, deadline: Deadline) -> _Mapping:
        with self._connections.connection(deadline.left_s()) as connection:
            reply = connection.call(AttachRequest(segment_id, grant), AttachReply, deadline.left_s())
            if reply.size_bytes == NOT_ALLOWED:
                self._fall_back()
                raise OnDiskError(segment_id.hex())
            if reply.size_bytes == NOT_MAPPED:
                raise OnDiskError(segment_id.hex())
            read_descriptor, write_descriptor = connection.take_descriptors(2)
        return _Mapping(read_descriptor, write_descriptor, reply.size_bytes)

    def _fall_back(self) -> None:
        """All goes through frames from now on, under the name that says so."""
        self.name, self.fell_back, self.reaches_far = FRAMES, True, frozenset()
        log.warning(
            "the memory of %s may not be mapped by this client: blocks go through frames", self._connections.uri
        )
