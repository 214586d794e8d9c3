"""`inproc`: the client and the node share a process; bytes are copied directly. For tests and embedded pools."""

import itertools
import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import SHM
from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.transport.base import ReadBatch, ReadStatus, Target, Transport, WriteBatch, WriteStatus
from kvpool.transport.blocks import Bytes
from kvpool.transport.copying import begin_store_slots, scatter
from kvpool.transport.deadline import Deadline
from kvpool.transport.shm import begin_mapped
from kvpool.transport.streams import Streams

DISK_READ_BYTES = 8 << 20
"""Bytes that the node reads from its disk at a time."""


class Found(Protocol):
    """A flag for each slot of a read, and the bytes of those that are there."""

    @property
    def present(self) -> bytearray:
        """One flag a slot."""

    @property
    def views(self) -> list[memoryview]:
        """In the order of the flags."""


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

    def payload(self, segment_id: bytes) -> Bytes | None:
        """The segment's bytes; None when they are on disk."""

    def read(self, slots: list[int], generations: list[int], length: int) -> AbstractContextManager["Found"]:
        """The bytes of slots, wherever they lie, in place meanwhile."""

    def of(self, segment_id: bytes) -> "LocalStore":
        """The store of one of the node's segments."""

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
    reaches_far = frozenset({SHM})

    def __init__(self, target: Target) -> None:
        store = _stores.get(target.place)
        if store is None or store.incarnation != target.incarnation:
            raise UnavailableError(f"{target.uri} is not a node of this process")
        self._store = store
        self._owner = next(_owners)
        self._streams = Streams(target.streams)

    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """See `Transport.read`."""
        store = self._store.of(batch.segment_id)
        payload = store.payload(batch.segment_id)
        if payload is not None:  # bounded by the copies themselves
            return begin_mapped(payload, batch, self._streams)()
        return _read_disk(store, batch, deadline)

    def write(self, batches: Iterable[WriteBatch], deadline: Deadline) -> list[bytearray]:
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
            assert payload is not None, "a node prepares slots in memory alone"
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


def _read_disk(store: LocalStore, batch: ReadBatch, deadline: Deadline) -> bytearray:
    """Let the node read the batch's slots, some at a time, and copy them; one `ReadStatus` each."""
    statuses = bytearray([ReadStatus.FAILED]) * len(batch.destinations)
    seeds, expected = batch.seeds(), batch.checksums.tolist()
    step = max(1, DISK_READ_BYTES // batch.block_bytes)
    try:
        for first in range(0, len(statuses), step):
            deadline.left_s()
            some = slice(first, first + step)
            named = (batch.slots[some].tolist(), batch.generations[some].tolist())
            with store.read(*named, batch.block_bytes) as found:
                views = iter(found.views)
                for i, is_there in enumerate(found.present, first):
                    statuses[i] = ReadStatus.GONE
                    if is_there:
                        taken = scatter(np.frombuffer(next(views), np.uint8), batch.destinations.pieces(i), seeds[i])
                        statuses[i] = ReadStatus.OK if taken == expected[i] else ReadStatus.BAD
    except DeadlineError:
        return statuses.replace(bytes([ReadStatus.FAILED]), bytes([ReadStatus.LATE]))
    except KvpoolError:
        pass  # what was copied is verified; the rest stays FAILED
    return statuses
