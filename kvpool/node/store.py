"""The node's store: one segment's slots, headers and bytes, safe to call from every thread that serves them.

Owns the rule of writing: prepare -> bytes -> checksum and header -> commit with the directory -> visible. What the
directory does not take is freed at once.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.core.checksum import block_seeds, payload_checksum
from kvpool.core.directory import CommitStatus, FreeSlot
from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import KvpoolError, ProtocolError, UnavailableError, UsageError
from kvpool.core.grants import Grant, open_grant
from kvpool.core.keys import split_hashes
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, RESERVATION_S_MAX
from kvpool.core.slots import Slot, Slots, SlotState
from kvpool.node.headers import HeaderFile, SlotHeader
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.segment import Segment
from kvpool.transport.base import WriteStatus
from kvpool.transport.blocks import Bytes


class DirectoryLink(Protocol):
    """How the store tells the directory what was written."""

    def commit(self, segment_id: bytes, reservation: int, headers: list[SlotHeader]) -> list[CommitStatus]:
        """Commit written shards; raises UnavailableError when the directory cannot be asked."""

    def abort(self, reservation: int, hashes: list[bytes]) -> None:
        """Give blocks back that will not be written; best effort."""


@dataclass(frozen=True, slots=True)
class NodeSession:
    """The metadata service's session that the node obeys."""

    meta_incarnation: int
    session: int
    key: bytes


@dataclass(frozen=True, slots=True)
class _Writing:
    """What a prepared slot is for."""

    reservation: int
    header: SlotHeader


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and bytes of one segment, at one moment."""

    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    largest_free_bytes: int
    slots: int
    counters: dict[str, int]


class NodeStore:
    """One segment and everything in it. Thread-safe.

    Args:
        segment: Its memory; the caller closes it after the store is no longer used.
        headers: Its header file.
        slots: Its slots.
        book: Documents of the namespaces it holds blocks of.
        link: The directory.
        incarnation: The node's.
    """

    def __init__(
        self,
        segment: Segment,
        headers: HeaderFile,
        slots: Slots,
        book: NamespaceBook,
        link: DirectoryLink,
        incarnation: int,
    ) -> None:
        self.segment = segment
        self.incarnation = incarnation
        self.session: NodeSession | None = None
        self.draining = False
        self._headers = headers
        self._slots = slots
        self._book = book
        self._link = link
        self._lock = threading.Lock()
        self._writing: dict[int, _Writing] = {}
        self._counters: Counter[str] = Counter()

    # Writing

    def prepare(
        self, sealed: bytes, owner: int, first: int = 0, count: int | None = None
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Slots and generations for ``count`` blocks of a sealed grant; NO_SLOT where there is no room.

        Raises:
            ProtocolError: Not a grant of the current session for this segment, or not blocks of it.
            UnavailableError: The node has no session now, or drains.
        """
        grant = self._open(sealed)
        self._book.learn(grant.namespace)
        end = grant.count if count is None else first + count
        if not 0 <= first < end <= grant.count:
            raise ProtocolError(f"blocks {first} to {end} of a grant for {grant.count}")
        slots = np.full(end - first, NO_SLOT, np.uint32)
        generations = np.zeros(end - first, np.uint64)
        ttl_s = min(grant.ttl_ms / 1000, RESERVATION_S_MAX)
        part = slice(first * HASH_BYTES, end * HASH_BYTES)
        chain = zip(split_hashes(grant.hashes[part]), split_hashes(grant.parents[part]), strict=True)
        with self._lock:
            for page, generation in grant.victims():
                self._free(page, generation, rest=False)
            for i, (block_hash, parent) in enumerate(chain):
                slot = self._slots.prepare(grant.block_bytes, owner, ttl_s)
                if slot is None:
                    self._counters["no_slot"] += 1
                    continue
                slots[i], generations[i] = slot.page, slot.generation
                header = SlotHeader(
                    slot.page,
                    grant.shard,
                    grant.block_bytes,
                    slot.generation,
                    grant.namespace,
                    block_hash,
                    parent,
                    0,
                )
                self._headers.write(header, SlotState.WRITING)
                self._writing[slot.page] = _Writing(grant.reservation, header)
            self._headers.reserve_generations(self._slots.next_generation)
        return slots, generations

    def begin_receive(self, page: int, generation: int, owner: int) -> memoryview | None:
        """The slot's bytes, to receive into, kept in place until `end_receive`; None when it is not the owner's."""
        with self._lock:
            slot = self._slots.writing(page, generation, owner)
            if slot is None:
                return None
            slot.pins += 1
            length = self._writing[page].header.length
        return self._view(page, length)

    def end_receive(self, page: int, generation: int, checksum: int) -> WriteStatus:
        """The bytes have arrived: compare their checksum, computed while they are warm."""
        with self._lock:
            slot = self._slots.pinned(page, generation)
            writing = self._writing.get(page)
        matches = writing is not None and self._checksum(writing.header) == checksum
        with self._lock:
            self._slots.unpin(slot)
            if not matches:
                self._counters["bad_writes"] += 1
                self._free(page, generation, rest=False)
        return WriteStatus.COMMITTED if matches else WriteStatus.BAD

    def cancel_receive(self, page: int, generation: int) -> None:
        """The bytes did not arrive whole: the slot goes."""
        with self._lock:
            self._slots.unpin(self._slots.pinned(page, generation))
            self._free(page, generation, rest=False)

    def seal(
        self,
        segment_id: bytes,
        reservation: int,
        owner: int,
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint64],
        checksums: NDArray[np.uint64],
    ) -> bytes:
        """Commit slots whose bytes are complete; one `WriteStatus` each.

        The checksums are the writer's; whoever reads a block compares them with what it received.
        """
        self.check_segment(segment_id)
        statuses = bytearray([WriteStatus.STALE]) * len(slots)
        sealed: list[tuple[int, SlotHeader]] = []
        with self._lock:
            for i, page in enumerate(slots.tolist()):
                header = self._seal_one(page, int(generations[i]), int(checksums[i]), owner, reservation)
                if header is not None:
                    sealed.append((i, header))
                elif page == NO_SLOT:
                    statuses[i] = WriteStatus.NO_SLOT
        if sealed:
            for (i, _), status in zip(sealed, self._commit(reservation, [h for _, h in sealed]), strict=True):
                statuses[i] = status
        return bytes(statuses)

    def discard(self, pages: Iterable[int], generations: Iterable[int], owner: int) -> int:
        """Free prepared slots of ``owner``; how many there were."""
        with self._lock:
            mine = [(p, g) for p, g in zip(pages, generations, strict=True) if self._slots.writing(p, g, owner)]
            return sum(self._free(page, generation, rest=False) for page, generation in mine)

    def drop_owner(self, owner: int) -> None:
        """The writer is gone: free what it prepared and did not commit, and tell the directory."""
        with self._lock:
            dropped = [self._forget(slot) for slot in self._slots.drop_owner(owner)]
        by_reservation: dict[int, list[bytes]] = {}
        for writing in dropped:
            if writing is not None:
                by_reservation.setdefault(writing.reservation, []).append(writing.header.hash)
        for reservation, hashes in by_reservation.items():
            self._link.abort(reservation, hashes)

    # Reading

    def pin(self, page: int, generation: int, length: int) -> memoryview | None:
        """A committed slot's bytes, kept in place until `unpin`; None when it does not hold this generation."""
        with self._lock:
            slot = self._slots.pin(page, generation)
            if slot is None:
                return None
            if length > slot.pages * PAGE_BYTES:
                self._slots.unpin(slot)
                raise ProtocolError(f"slot {page} holds at most {slot.pages * PAGE_BYTES} bytes, not {length}")
        return self._view(page, length)

    def unpin(self, pinned: Iterable[tuple[int, int]]) -> None:
        """End `pin` for each (page, generation)."""
        with self._lock:
            for page, generation in pinned:
                self._slots.unpin(self._slots.pinned(page, generation))

    def payload(self, segment_id: bytes) -> Bytes:
        """All bytes of the segment."""
        self.check_segment(segment_id)
        return self.segment.payload

    def check_segment(self, segment_id: bytes) -> None:
        """Raise UsageError unless this is the segment meant."""
        if segment_id != self.segment.segment_id:
            raise UsageError(f"segment {segment_id.hex()} is not of this node; ask the directory again")

    # The directory's orders, and what the node says of itself

    def apply(self, orders: Iterable[FreeSlot]) -> None:
        """Free what the directory has given up."""
        with self._lock:
            for order in orders:
                if order.segment_id == self.segment.segment_id:
                    self._free(order.slot, order.generation, rest=order.rest)

    def expire(self) -> None:
        """Quarantine writes past their deadline; free what has rested."""
        with self._lock:
            for slot in self._slots.expire():
                self._counters["expired_writes"] += 1
                self._forget(slot)

    def inventory(self) -> list[SlotHeader]:
        """Headers of all committed slots."""
        with self._lock:
            return [header for header, state in self._headers.scan() if state == SlotState.COMMITTED]

    def free_headers(self, headers: Iterable[SlotHeader]) -> None:
        """Free committed slots that the directory does not want."""
        with self._lock:
            for header in headers:
                self._free(header.page, header.generation, rest=False)

    def stats(self) -> StoreStats:
        """Counts and bytes now."""
        with self._lock:
            return StoreStats(
                capacity_bytes=self.segment.size_bytes,
                used_bytes=self._slots.used_bytes,
                quarantined_bytes=self._slots.quarantined_bytes,
                largest_free_bytes=self._slots.largest_free_bytes,
                slots=len(self._slots),
                counters=dict(self._counters),
            )

    def _open(self, sealed: bytes) -> Grant:
        session = self.session
        if session is None or self.draining:
            raise UnavailableError("the node takes no writes now: it drains, or has lost the metadata service")
        grant = open_grant(sealed, session.key)
        if (grant.incarnation, grant.session) != (session.meta_incarnation, session.session):
            raise ProtocolError("the write grant is of another session; reserve again")
        self.check_segment(grant.segment_id)
        return grant

    def _seal_one(self, page: int, generation: int, checksum: int, owner: int, reservation: int) -> SlotHeader | None:
        slot = self._slots.writing(page, generation, owner)
        writing = self._writing.get(page)
        if slot is None or writing is None or writing.reservation != reservation:
            return None
        old = writing.header
        header = SlotHeader(page, old.shard, old.length, generation, old.namespace, old.hash, old.parent, checksum)
        self._headers.write(header, SlotState.COMMITTED)
        self._slots.commit(slot)
        del self._writing[page]
        return header

    def _commit(self, reservation: int, headers: list[SlotHeader]) -> list[WriteStatus]:
        try:
            answers = self._link.commit(self.segment.segment_id, reservation, headers)
        except KvpoolError:
            # The directory may or may not have heard: keep nothing that it might not know of.
            self._counters["commits_failed"] += len(headers)
            self.free_headers(headers)
            return [WriteStatus.FAILED] * len(headers)
        stale = [h for h, answer in zip(headers, answers, strict=True) if answer != CommitStatus.COMMITTED]
        self.free_headers(stale)
        self._counters["committed"] += len(headers) - len(stale)
        return [WriteStatus.COMMITTED if answer == CommitStatus.COMMITTED else WriteStatus.STALE for answer in answers]

    def _free(self, page: int, generation: int, *, rest: bool) -> bool:
        freed = self._slots.free(page, generation, rest=rest)
        if freed:
            self._headers.clear(page)
            self._writing.pop(page, None)
        return freed

    def _forget(self, slot: Slot) -> _Writing | None:
        self._headers.clear(slot.page)
        return self._writing.pop(slot.page, None)

    def _checksum(self, header: SlotHeader) -> int:
        namespace_seed = int.from_bytes(header.namespace[:8], "little")
        (seed,) = block_seeds(namespace_seed, header.hash, header.shard, [header.generation], header.length)
        return payload_checksum(self._view(header.page, header.length), seed)

    def _view(self, page: int, length: int) -> memoryview:
        return self.segment.payload[page * PAGE_BYTES : page * PAGE_BYTES + length].data
