"""The node's store: one segment's slots, headers and bytes, safe to call from every thread that serves them.

Owns the rule of writing: prepare -> bytes -> checksum and header -> commit with the directory -> visible. What the
directory does not take is freed at once.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import CommitStatus, FreeSlot
from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import KvpoolError, ProtocolError, UnavailableError, UsageError
from kvpool.core.grants import Grant, open_grant
from kvpool.core.keys import split_hashes
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, RESERVATION_S_MAX
from kvpool.core.slots import Slot, Slots, SlotState
from kvpool.node.checking import Checks
from kvpool.node.directory_link import DirectoryLink
from kvpool.node.headers import HeaderFile, SlotHeaders, checksum_seeds, make_records
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.records import NodeSession, Reading, Receiving, StoreStats
from kvpool.node.segment import Segment
from kvpool.ops.failpoints import failpoint
from kvpool.ops.logging import get_logger
from kvpool.transport.base import WriteStatus
from kvpool.transport.blocks import Bytes

if TYPE_CHECKING:
    from kvpool.node.disk.store import DiskStore

log = get_logger(__name__)


class NodeStore:
    """One segment and everything in it. Thread-safe.

    `checks` compares what it holds with the headers. The store of a node's memory has that of its `disk` beside it, if
    there is one.

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
        self.read_session: NodeSession | None = None
        """The latest session, which read grants are of, also while the metadata service is out of reach."""
        self.draining = False
        self.off = ""
        """Why its medium is out of use; empty while it is in use."""
        self.disk: DiskStore | None = None
        self.book = book
        self.in_doubt = False
        """Whether the directory may name slots that are free here: it never answered a commit."""
        self._headers = headers
        self._slots = slots
        self._link = link
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._committing: set[int] = set()
        """Generations of slots whose commit is under way: an inventory leaves them to it, for it may be refused.

        Not their pages: one may be freed by an order and be committed anew before its first commit is answered."""
        self.checks = Checks(segment, headers, slots, self._lock, self._counters, link, self.read_failed)

    @property
    def tiers(self) -> "tuple[NodeStore, ...]":
        """This store, and that of the disk below it."""
        return (self,) if self.disk is None else (self, self.disk)

    def of(self, segment_id: bytes) -> "NodeStore":
        """The store of one of the node's segments; raises UsageError for another's."""
        for store in self.tiers:
            if store.segment.segment_id == segment_id:
                return store
        raise UsageError(f"segment {segment_id.hex()} is not of this node; ask the directory again")

    # Writing

    def open_grant(self, sealed: bytes) -> Grant:
        """The grant in ``sealed``, for whichever of the node's segments; raises as `prepare`."""
        return self._open(sealed, self.session)

    def prepare(
        self, sealed: bytes, owner: int, *, bound: bool = True
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Slots and generations for the blocks of a sealed grant; NO_SLOT where there is no room.

        ``bound`` says that the owner's end will be told by `drop_owner`.

        Raises:
            ProtocolError: Not a grant of the current session for this segment.
            UnavailableError: The node has no session now, or drains.
        """
        failpoint("node.put.before_prepare")
        session = self.session
        grant = self._open(sealed, session)
        self.check_segment(grant.segment_id)
        self.book.learn(grant.namespace)
        slots = np.full(grant.count, NO_SLOT, np.uint32)
        generations = np.zeros(grant.count, np.uint64)
        with self._lock:
            if self.session is not session:
                # Its victims may be in an inventory by now.
                raise ProtocolError("the write grant is of another session; reserve again")
            for page, generation in grant.victims():
                self._free(page, generation, rest=False)
            opened = self._open_slots(grant, owner, bound=bound)
            slots[: len(opened)] = opened.pages
            generations[: len(opened)] = opened.records["generation"]
            self._counters["no_slot"] += grant.count - len(opened)
        failpoint("node.put.after_prepare")
        return slots, generations

    def begin_receive(
        self, slots: NDArray[np.uint32], generations: NDArray[np.uint64], owner: int
    ) -> list[Receiving | None]:
        """Where to receive the bytes of prepared slots; None for one that is not the owner's.

        The slots stay in place until `end_receive`, which must follow whatever happens.
        """
        named = zip(slots.tolist(), generations.tolist(), strict=True)
        with self._lock:
            found = [self._slots.writing(page, generation, owner) for page, generation in named]
            mine = [slot for slot in found if slot is not None]
            for slot in mine:
                slot.pins += 1
            seeds = iter(self._seeds(mine))
            return [None if s is None else Receiving(s, self._view(s.page, s.length), next(seeds)) for s in found]

    def end_receive(self, received: list[tuple[Receiving, bool]]) -> None:
        """The bytes have arrived, and are the writer's (True) or not: then the slot goes."""
        with self._lock:
            for receiving, sound in received:
                slot = receiving.slot
                self._slots.unpin(slot)
                if not sound:
                    self._counters["bad_writes"] += 1
                    self._free(slot.page, slot.generation, rest=False)

    def commit_slots(
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
        statuses = np.where(slots == NO_SLOT, np.uint8(WriteStatus.NO_SLOT), np.uint8(WriteStatus.STALE))
        with self._lock:
            sealed: list[int] = []
            for i, (page, generation) in enumerate(zip(slots.tolist(), generations.tolist(), strict=True)):
                slot = self._slots.writing(page, generation, owner)
                if slot is not None and slot.reservation == reservation:
                    self._slots.commit(slot)
                    sealed.append(i)
                else:
                    self._slots.finish(page, generation, owner)
            try:
                failpoint("node.put.before_header")
                headers = self._headers.commit(slots[sealed], checksums[sealed])
                self._committing.update(headers.records["generation"].tolist())
            except BaseException:
                # Nobody will ever name them: no slot may stay that is committed and was not reported.
                for i in sealed:
                    self._free(int(slots[i]), int(generations[i]), rest=False)
                raise
        if sealed:
            statuses[sealed] = self._commit(reservation, headers)
        return statuses.tobytes()

    def discard(self, pages: Iterable[int], generations: Iterable[int], owner: int) -> int:
        """Free prepared slots of ``owner``; how many there were."""
        with self._lock:
            mine = [(p, g) for p, g in zip(pages, generations, strict=True) if self._slots.writing(p, g, owner)]
            return sum(self._free(page, generation, rest=False) for page, generation in mine)

    def drop_owner(self, owner: int) -> None:
        """The writer is gone: free what it prepared and did not commit, and tell the directory."""
        with self._lock:
            dropped = self._slots.drop_owner(owner)
            if not dropped:
                return
            pages = [slot.page for slot in dropped]
            hashes = split_hashes(self._headers.read(np.array(pages, np.uint32)).records["hash"].tobytes())
            self._headers.clear(pages)
        failpoint("node.owner.after_drop")
        by_reservation: dict[int, list[bytes]] = {}
        for slot, block_hash in zip(dropped, hashes, strict=True):
            by_reservation.setdefault(slot.reservation, []).append(block_hash)
        for reservation, abandoned in by_reservation.items():
            self._link.abort(reservation, abandoned)

    # Reading

    def pin(self, page: int, generation: int, length: int, namespace: bytes | None = None) -> memoryview | None:
        """A committed slot's bytes, kept in place until `unpin`; None when it does not hold this generation.

        ``namespace``, if given, is the one that its block must be of; of another it is not there.
        """
        return self._view(page, length) if self._pin(page, generation, length, namespace) else None

    @contextmanager
    def read(
        self, slots: list[int], generations: list[int], length: int, namespace: bytes | None = None
    ) -> Iterator[Reading]:
        """The bytes of those slots that are committed and hold these generations, which stay in place meanwhile.

        ``namespace``, if given, is the one that the reader may read; blocks of others are not there for it.

        Raises:
            ProtocolError: A slot is shorter than ``length``, or they are too many.
        """
        pinned: list[tuple[int, int]] = []
        found = Reading(bytearray(len(slots)), [])
        try:
            for i, (page, generation) in enumerate(zip(slots, generations, strict=True)):
                view = self.pin(page, generation, length, namespace)
                if view is not None:
                    pinned.append((page, generation))
                    found.present[i] = 1
                    found.views.append(view)
            failpoint("node.get.after_pin")
            yield found
        finally:
            self.unpin(pinned)

    def read_failed(self, error: OSError, headers: SlotHeaders) -> None:
        """The medium could not give a block's bytes, and the directory was told."""
        raise NotImplementedError("memory has no such errors")

    def unpin(self, pinned: Iterable[tuple[int, int]]) -> None:
        """Let go of each pinned (page, generation)."""
        failpoint("node.get.before_unpin")
        with self._lock:
            for page, generation in pinned:
                self._slots.unpin(self._slots.pinned(page, generation))

    def payload(self, segment_id: bytes) -> Bytes | None:
        """All bytes of the segment; None when they are not in memory."""
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
                    if order.rest:
                        self.checks.suspect(order.slot, order.generation)

    def expire(self) -> None:
        """Quarantine writes past their deadline; free what has rested."""
        with self._lock:
            expired = self._slots.expire()
            self._counters["expired_writes"] += len(expired)
            self._headers.clear([slot.page for slot in expired])

    def inventory(self) -> SlotHeaders:
        """Headers of all committed slots, but for those whose commit is under way."""
        with self._lock:
            headers = self._headers.scan(SlotState.COMMITTED)
            if not self._committing:
                return headers
            return headers.select(~np.isin(headers.records["generation"], list(self._committing)))

    def free_headers(self, headers: SlotHeaders) -> None:
        """Free committed slots that the directory does not want."""
        with self._lock:
            for page, generation in headers.named():
                self._free(page, generation, rest=False)

    def stats(self) -> StoreStats:
        """Counts and bytes now."""
        with self._lock:
            return StoreStats(
                capacity_bytes=self.segment.size_bytes,
                used_bytes=self._slots.used_bytes,
                quarantined_bytes=self._slots.quarantined_bytes,
                retired_bytes=self._slots.retired_bytes,
                largest_free_bytes=self._slots.largest_free_bytes,
                slots=len(self._slots),
                counters=dict(self._counters),
            )

    def _open(self, sealed: bytes, session: NodeSession | None) -> Grant:
        if session is None or self.draining:
            raise UnavailableError("the node takes no writes now: it drains, or has lost the metadata service")
        grant = open_grant(sealed, session.key)
        if (grant.incarnation, grant.session) != (session.meta_incarnation, session.session):
            raise ProtocolError("the write grant is of another session; reserve again")
        return grant

    def _open_slots(self, grant: Grant, owner: int, *, bound: bool) -> SlotHeaders:
        """Open and describe slots for the first blocks of ``grant``, as many as there is room for."""
        ttl_s = min(grant.ttl_ms / 1000, RESERVATION_S_MAX)
        self._headers.reserve_generations(self._slots.next_generation + grant.count)
        opened = self._slots.prepare(grant.block_bytes, grant.count, owner, ttl_s, grant.reservation, bound=bound)
        records = make_records(
            len(opened),
            shard=grant.shard,
            length=grant.block_bytes,
            generation=[slot.generation for slot in opened],
            namespace=grant.namespace,
            hash=grant.hashes[: len(opened) * HASH_BYTES],
            parent=grant.parents[: len(opened) * HASH_BYTES],
        )
        headers = SlotHeaders(np.array([slot.page for slot in opened], np.uint32), records)
        self._headers.write(headers, SlotState.WRITING)
        return headers

    def _commit(self, reservation: int, headers: SlotHeaders) -> NDArray[np.uint8]:
        """Ask the directory to take slots in, and free those that it does not; one `WriteStatus` each."""
        session = self.session
        answers: NDArray[np.uint8] | None = None
        try:
            with suppress(KvpoolError):
                failpoint("node.put.after_header")
                answers = self._link.commit(self.segment.segment_id, reservation, headers)
                failpoint("node.put.after_report")
        finally:
            statuses = self._settle(session, headers, answers)
        return statuses

    def _settle(
        self, session: NodeSession | None, headers: SlotHeaders, answers: NDArray[np.uint8] | None
    ) -> NDArray[np.uint8]:
        """Keep what the directory has taken in, free the rest; one `WriteStatus` each. None: it did not answer."""
        with self._lock:
            # The inventory of a later session has left these slots out: whatever an earlier one answers, they go.
            is_current = self.session is session
            self._committing.difference_update(headers.records["generation"].tolist())
            if answers is None:
                # The directory may or may not have heard, or hear yet: keep nothing that it might not know of, and let
                # the control loop begin a new session, which outdates the commit and tells anew what is here.
                self.in_doubt |= is_current
                statuses = np.full(len(headers), WriteStatus.FAILED, np.uint8)
                self._counters["commits_failed"] += len(headers)
            else:
                taken = (answers == CommitStatus.COMMITTED) & is_current
                statuses = np.where(taken, np.uint8(WriteStatus.COMMITTED), np.uint8(WriteStatus.STALE))
                self._counters["committed"] += int(taken.sum())
            if statuses.any():
                for page, generation in headers.select(statuses != WriteStatus.COMMITTED).named():
                    self._free(page, generation, rest=False)
        return statuses

    def _free(self, page: int, generation: int, *, rest: bool) -> bool:
        freed = self._slots.free(page, generation, rest=rest)
        if freed:
            self._headers.clear(page)
        return freed

    def _pin(self, page: int, generation: int, length: int, namespace: bytes | None) -> bool:
        """Keep a committed slot in place until `unpin`; False when it does not hold this generation."""
        with self._lock:
            slot = self._slots.pin(page, generation)
            if slot is None:
                return False
            if namespace is not None and self._headers.namespace(page) != namespace:
                self._slots.unpin(slot)
                self._counters["foreign_reads"] += 1
                return False
            if length > slot.pages * PAGE_BYTES:
                self._slots.unpin(slot)
                raise ProtocolError(f"slot {page} holds at most {slot.pages * PAGE_BYTES} bytes, not {length}")
        return True

    def _seeds(self, slots: list[Slot]) -> list[int]:
        """Checksum seeds of the slots, from their headers."""
        return checksum_seeds(self._headers.read(np.array([slot.page for slot in slots], np.uint32)).records)

    def _view(self, page: int, length: int) -> memoryview:
        return self.segment.view(page, length)
