"""`inproc`: the client and the node share a process; bytes are copied directly. For tests and embedded pools."""

import itertools
import threading
import weakref
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.limits import PAGE_BYTES
from kvpool.transport.base import ReadBatch, ReadStatus, Transport, WriteBatch, WriteStatus
from kvpool.transport.copying import Bytes, gather, scatter
from kvpool.transport.deadline import Deadline


class LocalStore(Protocol):
    """What the transport needs of a node in this process."""

    incarnation: int

    def prepare(self, sealed: bytes, owner: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Slots and generations for a grant."""

    def seal(
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

    def __init__(self, uri: str, _principal: str, incarnation: int, _streams: int, _timeout_s: float) -> None:
        store = _stores.get(uri.partition("://")[2])
        if store is None or store.incarnation != incarnation:
            raise UnavailableError(f"{uri} is not a node of this process")
        self._store = store
        self._owner = next(_owners)

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`."""
        del deadline  # bounded by the copies themselves
        payload, length = self._store.payload(batch.segment_id), batch.block_bytes
        rows = zip(batch.slots.tolist(), batch.checksums.tolist(), batch.seeds(), batch.destinations, strict=True)
        return bytearray(
            ReadStatus.OK
            if scatter(payload[slot * PAGE_BYTES :][:length], pieces, seed) == checksum
            else ReadStatus.BAD
            for slot, checksum, seed, pieces in rows
        )

    def write(self, batch: WriteBatch, deadline: Deadline) -> bytearray:
        """See `Transport.write`."""
        try:
            deadline.left_s()
            slots, generations = self._store.prepare(batch.grant, self._owner)
            payload, seeds = self._store.payload(batch.segment_id), batch.seeds(generations)
            checksums = np.zeros(len(slots), np.uint64)
            for i, slot in enumerate(slots.tolist()):
                if slot != NO_SLOT:
                    start = slot * PAGE_BYTES
                    checksums[i] = gather(batch.sources[i], payload[start : start + batch.block_bytes], seeds[i])
            return bytearray(
                self._store.seal(batch.segment_id, batch.reservation, self._owner, slots, generations, checksums)
            )
        except KvpoolError:
            return bytearray([WriteStatus.FAILED]) * len(batch.sources)

    def close(self) -> None:
        """See `Transport.close`."""
        self._store.drop_owner(self._owner)
