"""`shm`: the client maps the node's payload segment and copies; the node is asked only to prepare and commit writes.

Reads go through a read-only mapping and cost no system call and no server work. A reused or half-written slot cannot
pass: acceptance is the checksum over the destination. Prepared slots belong to the connection that prepared them; the
node takes them back when it closes.
"""

import mmap
import os
import threading

import numpy as np

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ClosedError, KvpoolError, ProtocolError, UnavailableError
from kvpool.core.limits import PAGE_BYTES
from kvpool.transport.base import ReadBatch, ReadStatus, Transport, WriteBatch, WriteStatus
from kvpool.transport.copying import Bytes, gather, scatter
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.populate import Populator
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import (
    AttachReply,
    AttachRequest,
    PrepareReply,
    PrepareRequest,
    SealRequest,
    Statuses,
    pack,
    unpack,
)


class _Mapping:
    """One segment's payload, mapped; the writable view is mapped when first needed."""

    def __init__(self, read_descriptor: int, write_descriptor: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._write_descriptor = write_descriptor
        self._lock = threading.Lock()
        self._writable: Bytes | None = None
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
            if self._writable is None:
                self._writable = np.frombuffer(mmap.mmap(self._write_descriptor, self.size_bytes), np.uint8)
                self._populators.append(Populator(self._writable, writable=True))
            return self._writable

    def close(self) -> None:
        """Drop the mappings; memory goes when the last view of a running copy does."""
        for populator in self._populators:
            populator.stop()
        os.close(self._write_descriptor)
        self._writable = None


class ShmTransport(Transport):
    """Mapped shared memory of a node on this host, reached through its Unix socket (``shm:///path``)."""

    name = "shm"

    def __init__(self, uri: str, principal: str, incarnation: int, _streams: int, timeout_s: float) -> None:
        path = uri.partition("://")[2]
        self._connections = ConnectionPool(f"unix://{path}", principal, incarnation)
        self._mappings: dict[bytes, _Mapping] = {}
        self._lock = threading.Lock()
        with self._connections.connection(timeout_s):
            pass  # the node is on this host and answers

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`; the time it takes is bounded by the copies themselves."""
        statuses = bytearray(len(batch.destinations))
        try:
            segment = self._mapping(batch.segment_id, deadline)
        except (KvpoolError, OSError):
            return bytearray([ReadStatus.FAILED]) * len(statuses)
        payload, length = segment.readable, batch.block_bytes
        rows = zip(batch.slots.tolist(), batch.checksums.tolist(), batch.seeds(), batch.destinations, strict=True)
        for i, (slot, checksum, seed, pieces) in enumerate(rows):
            start = slot * PAGE_BYTES
            source = payload[start : start + length]
            if len(source) != length or scatter(source, pieces, seed) != checksum:
                statuses[i] = ReadStatus.BAD
        return statuses

    def write(self, batch: WriteBatch, deadline: Deadline) -> bytearray:
        """See `Transport.write`."""
        failed = bytearray([WriteStatus.FAILED]) * len(batch.sources)
        try:
            segment = self._mapping(batch.segment_id, deadline)
            with self._connections.connection(deadline.left_s()) as connection:
                return self._write_on(connection, segment, batch, deadline)
        except ClosedError:
            raise
        except (KvpoolError, OSError):
            return failed

    def close(self) -> None:
        """See `Transport.close`."""
        self._connections.close()
        with self._lock:
            for mapping in self._mappings.values():
                mapping.close()
            self._mappings.clear()

    def _write_on(self, connection: Connection, segment: _Mapping, batch: WriteBatch, deadline: Deadline) -> bytearray:
        count = len(batch.sources)
        prepared = connection.call(PrepareRequest(batch.grant, 0, count), PrepareReply, deadline.left_s())
        slots = unpack("slots", prepared.slots, "<u4", count)
        generations = unpack("generations", prepared.generations, "<u8", count)
        seeds = batch.seeds(generations)
        checksums = np.zeros(count, np.uint64)
        payload, length = segment.writable(), batch.block_bytes
        for i, slot in enumerate(slots.tolist()):
            start = slot * PAGE_BYTES
            if slot == NO_SLOT:
                continue
            if start + length > segment.size_bytes:
                raise ProtocolError(f"the node prepared slot {slot}, outside its own segment")
            checksums[i] = gather(batch.sources[i], payload[start : start + length], seeds[i])
        request = SealRequest(
            batch.segment_id, batch.reservation, prepared.slots, prepared.generations, pack(checksums, "<u8")
        )
        return bytearray(connection.call(request, Statuses, deadline.left_s()).statuses)

    def _mapping(self, segment_id: bytes, deadline: Deadline) -> _Mapping:
        mapping = self._mappings.get(segment_id)
        if mapping is None:
            with self._lock:
                mapping = self._mappings.get(segment_id)
                if mapping is None:
                    mapping = self._mappings[segment_id] = self._attach(segment_id, deadline)
        return mapping

    def _attach(self, segment_id: bytes, deadline: Deadline) -> _Mapping:
        with self._connections.connection(deadline.left_s()) as connection:
            reply = connection.call(AttachRequest(segment_id), AttachReply, deadline.left_s())
            read_descriptor, write_descriptor = connection.take_descriptors(2)
        return _Mapping(read_descriptor, write_descriptor, reply.size_bytes)
