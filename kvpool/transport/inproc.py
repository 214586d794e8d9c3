"""`inproc`: the client and the node share a process; bytes are copied directly. For tests and embedded pools."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.transport.base import ReadBatch, Transport, WriteBatch, WriteStatus
from kvpool.transport.blocks import Bytes
from kvpool.transport.copying import begin_store_slots
from kvpool.transport.deadline import Deadline
from kvpool.transport.shm import read_mapped
from kvpool.transport.streams import Streams


class LocalStore(Protocol):
    """What the transport needs of a node in this process."""

    incarnation: int

    def prepare(self, sealed: bytes, owner: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Slots and generations for a grant."""

    def commit_slots(
        self,
        segment_id: bytes,
        reservation: int,
        owner: int,
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint64],
        checksums: NDArray[np.uint64],
    ) -> bytes:
        """Commit written slots; one `WriteStatus` each."""

    def payload(self, segment_id: bytes) -> Bytes:
        """The segment's bytes."""

    def drop_owner(self, owner: int) -> None:
        """Take back what ``owner`` prepared and did not commit."""


_stores: "weakref.WeakValueDictionary[str, LocalStore]" = weakref.WeakValueDictionary()
"""The nodes of this process by name: what an ``inproc://name`` URI resolves against, as a port does on a host."""
_owners = itertools.count(-1, -1)
_lock = threading.Lock()


def register(name: str, store: LocalStore) -> str:
    """Make ``store`` reachable as the returned URI while it lives."""
    with _lock:
        _stores[name] = store
    return f"inproc://{name}"


class InprocTransport(Transport):
    """A node in this very process."""

    name = "inproc"
    reaches_far = True

    def __init__(self, uri: str, _principal: str, incarnation: int, streams: int, _timeout_s: float) -> None:
        store = _stores.get(uri.partition("://")[2])
        if store is None or store.incarnation != incarnation:
            raise UnavailableError(f"{uri} is not a node of this process")
        self._store = store
        self._owner = next(_owners)
        self._streams = Streams(streams)

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`."""
        del deadline  # bounded by the copies themselves
        return read_mapped(self._store.payload(batch.segment_id), batch, self._streams)

    def write(self, batches: Sequence[WriteBatch], deadline: Deadline) -> list[bytearray]:
        """See `Transport.write`."""
        return [self._write_one(batch, deadline) for batch in batches]

    def close(self) -> None:
        """See `Transport.close`."""
        self._store.drop_owner(self._owner)
        self._streams.close()

    def _write_one(self, batch: WriteBatch, deadline: Deadline) -> bytearray:
        statuses = bytearray([WriteStatus.NO_SLOT]) * len(batch.sources)
        try:
            deadline.left_s()
            slots, generations = self._store.prepare(batch.grant, self._owner)
            ready = np.flatnonzero(slots != NO_SLOT)
            blocks = ready.tolist()
            if not blocks:
                return statuses
            slots, generations = slots[ready], generations[ready]
            payload, seeds = self._store.payload(batch.segment_id), batch.seeds(generations, blocks)
            stored = begin_store_slots(payload, slots, batch.sources.select(blocks), seeds)
            checksums = np.array(stored(), np.uint64)
            done = self._store.commit_slots(
                batch.segment_id, batch.reservation, self._owner, slots, generations, checksums
            )
        except KvpoolError:
            return bytearray([WriteStatus.FAILED]) * len(batch.sources)
        for block, status in zip(blocks, done, strict=True):
            statuses[block] = status
        return statuses
