"""A node's slots: who writes, what is committed, what is pinned, and when pages may be used again.

A slot is an extent of pages named by its first page. Its generation comes from one counter of the segment, so no
(slot, generation) is ever used twice. States: writing -> committed -> free, with three detours: a slot freed while a
served read pins it stays until the last unpin, one whose writer may still be alive rests in quarantine, and one whose
bytes went bad is retired: it stays in quarantine for good.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from kvpool.core.clock import Clock
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slab import Slab
from kvpool.core.units import pages_of


class SlotState(IntEnum):
    """State of a slot that is not free; the numbers stand in slot headers."""

    WRITING = 1
    COMMITTED = 2
    QUARANTINED = 3


@dataclass(slots=True)
class Slot:
    """One extent in use.

    Attributes:
        page: First page; the slot's name.
        pages: Length.
        length: Bytes of its block.
        generation: Unique within the segment's life.
        reservation: The write token it was opened for.
        owner: The writer: a connection's number. Only it may commit or abort.
        bound: Whether the owner's end will be told (`drop_owner`): until then its abandoned writes stay in quarantine.
        until_s: Writing: when the reservation runs out. Quarantined: when the pages may be used again.
        pins: Served reads, and received writes, that touch its bytes now.
        doomed: Free it at the last unpin.
    """

    page: int
    pages: int
    length: int
    generation: int
    reservation: int
    owner: int
    bound: bool
    until_s: float
    state: SlotState = SlotState.WRITING
    pins: int = 0
    doomed: bool = False


class Slots:
    """All slots of one segment. Not thread-safe: the node holds one lock.

    Args:
        pages: Size of the segment.
        clock: Monotonic seconds.
        first_generation: Above every generation the segment ever used.
        quarantine_s: How long an abandoned or forcibly freed slot rests.
    """

    def __init__(self, pages: int, clock: Clock, first_generation: int = 1, quarantine_s: float = 30.0) -> None:
        self._slab = Slab(pages)
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._slots: dict[int, Slot] = {}
        self._by_owner: dict[int, set[int]] = {}
        self._quarantined: set[int] = set()
        self._abandoned: dict[int, set[int]] = {}
        self.next_generation = first_generation
        self.quarantined_bytes = 0
        self._retired: set[int] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages that are not free."""
        return (self._slab.pages - self._slab.free_pages) * PAGE_BYTES

    @property
    def retired_bytes(self) -> int:
        """Bytes of the pages that are never given out again."""
        return sum(self._slots[page].pages for page in self._retired) * PAGE_BYTES

    @property
    def largest_free_bytes(self) -> int:
        """The longest block that still fits."""
        return self._slab.largest_free * PAGE_BYTES

    def prepare(
        self, length: int, count: int, owner: int, ttl_s: float, reservation: int = 0, *, bound: bool = True
    ) -> list[Slot]:
        """Writing slots for up to ``count`` blocks of ``length`` bytes: as many as find a free extent."""
        pages = pages_of(length)
        starts = self._slab.allocate_run(pages, count)
        if not starts:
            return []
        until_s, generation = self._clock() + ttl_s, self.next_generation
        self.next_generation += len(starts)
        slots = [
            Slot(page, pages, length, generation + i, reservation, owner, bound, until_s)
            for i, page in enumerate(starts)
        ]
        self._slots.update(zip(starts, slots, strict=True))
        self._by_owner.setdefault(owner, set()).update(starts)
        return slots

    def adopt(self, page: int, length: int, generation: int, *, committed: bool) -> Slot | None:
        """A slot found again after a restart; None when it overlaps another.

        One that was being written rests in quarantine, since its old writer may still have it mapped.
        """
        pages = pages_of(length)
        if not self._slab.take(page, pages):
            return None
        slot = Slot(page, pages, length, generation, 0, 0, bound=False, until_s=0.0, state=SlotState.COMMITTED)
        self._slots[page] = slot
        self.next_generation = max(self.next_generation, generation + 1)
        if not committed:
            self._quarantine(slot)
        return slot

    def writing(self, page: int, generation: int, owner: int) -> Slot | None:
        """The slot, if ``owner`` is still writing exactly this generation of it."""
        slot = self._find(page, generation)
        if slot is None or slot.state != SlotState.WRITING or slot.owner != owner or slot.doomed:
            return None
        return slot

    def commit(self, slot: Slot) -> None:
        """The slot's bytes are complete and may be served; its writer has no more say."""
        assert slot.state == SlotState.WRITING
        self._disown(slot)
        slot.state = SlotState.COMMITTED

    def free(self, page: int, generation: int, *, rest: bool = False) -> bool:
        """Free the slot if it still holds ``generation``; after quarantine with ``rest``.

        False if it does not, or was freed before and only waits for its readers or its rest to end.
        """
        slot = self._find(page, generation)
        if slot is None or slot.doomed or slot.state == SlotState.QUARANTINED:
            return False
        self._disown(slot)
        if rest:
            self._quarantine(slot)
        else:
            self._release(slot)
        return True

    def pin(self, page: int, generation: int) -> Slot | None:
        """Keep a committed slot's bytes in place until `unpin`; None when it does not hold ``generation``."""
        slot = self._find(page, generation)
        if slot is None or slot.state != SlotState.COMMITTED or slot.doomed:
            return None
        slot.pins += 1
        return slot

    def unpin(self, slot: Slot) -> None:
        """End what `pin` began; the last one frees a slot that was freed meanwhile."""
        slot.pins -= 1
        if slot.doomed and not slot.pins:
            self._release(slot)

    def pinned(self, page: int, generation: int) -> Slot:
        """The slot that the caller has pinned; it stays until unpinned, whatever became of it."""
        slot = self._find(page, generation)
        assert slot is not None
        assert slot.pins
        return slot

    def committed_in(self, pages: range) -> list[Slot]:
        """Committed slots that begin in ``pages``, in order."""
        found = [slot for page in pages if (slot := self._slots.get(page)) is not None]
        return [slot for slot in found if slot.state == SlotState.COMMITTED and not slot.doomed]

    def pin_resting(self, page: int, generation: int) -> Slot | None:
        """`pin` for a slot that rests in quarantine and was committed; None when it does not hold ``generation``."""
        slot = self._find(page, generation)
        if slot is None or slot.state != SlotState.QUARANTINED or slot.until_s == math.inf or slot.doomed:
            return None
        slot.pins += 1
        return slot

    def retire(self, slot: Slot) -> bool:
        """Never give the pages of a pinned slot out again, be it freed meanwhile or not; False when they are retired.

        Memory that failed once is likely to fail again: the pages come back with the node's next start.
        """
        assert slot.pins
        assert slot.state != SlotState.WRITING
        if slot.page in self._retired:
            return False
        if slot.state != SlotState.QUARANTINED:
            slot.state = SlotState.QUARANTINED
            self._quarantined.add(slot.page)
            self.quarantined_bytes += slot.pages * PAGE_BYTES
        slot.until_s, slot.doomed = math.inf, False
        self._retired.add(slot.page)
        return True

    def finish(self, page: int, generation: int, owner: int) -> None:
        """``owner`` will not write the slot any more: if its time ran out meanwhile, nobody needs to wait for it."""
        slot, abandoned = self._find(page, generation), self._abandoned.get(owner, set())
        if slot is not None and page in abandoned:
            abandoned.discard(page)
            self._release(slot)

    def drop_owner(self, owner: int) -> list[Slot]:
        """The writer is gone for good, so nothing can write its slots any more: free them."""
        dropped = [self._slots[page] for page in self._by_owner.pop(owner, ())]
        for slot in dropped:
            self._release(slot)
        for page in self._abandoned.pop(owner, ()):
            self._release(self._slots[page])
        return dropped

    def expire(self) -> list[Slot]:
        """Quarantine writes past their deadline and free what has rested long enough; returns the former."""
        now_s = self._clock()
        due = [slot for slot in self._resting_or_writing() if slot.until_s <= now_s]
        expired = [slot for slot in due if slot.state == SlotState.WRITING]
        for slot in due:
            if slot.state == SlotState.QUARANTINED:
                self._release(slot)
        for slot in expired:
            self._disown(slot)
            self._quarantine(slot)
        return expired

    def check_integrity(self) -> None:
        """Assert that slots and free extents cover the segment without overlap."""
        self._slab.check_integrity()
        end = 0
        for page in sorted(self._slots):
            slot = self._slots[page]
            assert page >= end, "slots do not overlap"
            end = page + slot.pages
            assert slot.pins >= 0
        assert end <= self._slab.pages
        assert sum(slot.pages for slot in self) + self._slab.free_pages == self._slab.pages
        assert all(self._slots[p].state == SlotState.WRITING for pages in self._by_owner.values() for p in pages)

    def _resting_or_writing(self) -> list[Slot]:
        writing = [self._slots[page] for pages in self._by_owner.values() for page in pages]
        return writing + [self._slots[page] for page in self._quarantined]

    def _find(self, page: int, generation: int) -> Slot | None:
        slot = self._slots.get(page)
        return slot if slot is not None and slot.generation == generation else None

    def _disown(self, slot: Slot) -> None:
        pages = self._by_owner.get(slot.owner)
        if pages is not None:
            pages.discard(slot.page)
            if not pages:
                del self._by_owner[slot.owner]

    def _quarantine(self, slot: Slot) -> None:
        slot.until_s = self._clock() + self._quarantine_s
        if slot.state == SlotState.WRITING and slot.bound:
            # Its writer may only be paused, with the slot still mapped: nobody may have these pages while it lives.
            slot.until_s = math.inf
            self._abandoned.setdefault(slot.owner, set()).add(slot.page)
        slot.state = SlotState.QUARANTINED
        self._quarantined.add(slot.page)
        self.quarantined_bytes += slot.pages * PAGE_BYTES

    def _release(self, slot: Slot) -> None:
        if slot.pins:
            slot.doomed = True
            return
        if slot.state == SlotState.QUARANTINED:
            self._quarantined.discard(slot.page)
            self.quarantined_bytes -= slot.pages * PAGE_BYTES
        del self._slots[slot.page]
        self._slab.free(slot.page, slot.pages)
