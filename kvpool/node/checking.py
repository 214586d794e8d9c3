"""Checks of what a node holds: slots are pinned one by one and their bytes compared with their headers.

Bad slots are retired, told to the directory, counted and logged. Who checks, and how fast, is decided in `scrub`.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from kvpool.core.limits import HASH_BYTES, PAGE_BYTES
from kvpool.core.slots import Slot, Slots
from kvpool.node.directory_link import DirectoryLink
from kvpool.node.headers import HeaderFile, SlotHeaders, checksum_seeds
from kvpool.node.segment import Segment
from kvpool.ops.logging import get_logger

SUSPECTS_MAX = 4_096
WALK_PAGES = 4_096
"""Pages looked through for slots under the store's lock at a time: about 0.2 ms."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """What one stretch of checks found.

    Attributes:
        next_page: Where to go on.
        blocks: Blocks compared.
        size_bytes: Their bytes.
        bad: How many of them were bad.
    """

    next_page: int
    blocks: int = 0
    size_bytes: int = 0
    bad: int = 0

    def __add__(self, later: "Checked") -> "Checked":
        """This stretch and the one after it."""
        return Checked(
            later.next_page,
            self.blocks + later.blocks,
            self.size_bytes + later.size_bytes,
            self.bad + later.bad,
        )


@dataclass(frozen=True, slots=True)
class _Check:
    """A pinned slot; ``sound`` says that its header is as it was written: else nobody knows what its bytes must be."""

    slot: Slot
    view: memoryview
    headers: SlotHeaders
    sound: bool


class Checks:
    """The checks of one store, whose parts and lock it shares. Thread-safe."""

    def __init__(
        self,
        segment: Segment,
        headers: HeaderFile,
        slots: Slots,
        lock: threading.Lock,
        counters: "Counter[str]",
        link: DirectoryLink,
    ) -> None:
        self.pages = segment.size_bytes // PAGE_BYTES
        self._segment = segment
        self._headers = headers
        self._slots = slots
        self._lock = lock
        self._counters = counters
        self._link = link
        self._suspects: deque[tuple[int, int]] = deque(maxlen=SUSPECTS_MAX)

    def suspect(self, page: int, generation: int) -> None:
        """The directory took this slot back by force: a reader may have found its bytes bad. The lock is held."""
        self._suspects.append((page, generation))

    def look_at_suspects(self) -> Checked:
        """Check suspects while they rest in quarantine, before their pages are used again."""
        with self._lock:
            suspects = list(self._suspects)
            self._suspects.clear()
        return self._check(suspects)

    def walk(self, page: int, enough: Callable[[Checked], bool]) -> Checked:
        """Check committed slots from ``page`` on, until the end of the segment or it is ``enough``."""
        checked = Checked(page)
        while checked.next_page < self.pages and not enough(checked):
            start = checked.next_page
            pages = range(start, min(start + WALK_PAGES, self.pages))
            with self._lock:
                found = [(slot.page, slot.generation) for slot in self._slots.committed_in(pages)]
            for name in found:
                checked += self._check([name])
                if enough(checked):
                    break
            else:
                checked += Checked(pages.stop)
        return checked

    def _check(self, named: Iterable[tuple[int, int]]) -> Checked:
        checked = Checked(0)
        for page, generation in named:
            check = self._begin(page, generation)
            if check is None:
                checked += Checked(page + 1)
                continue
            good = True  # what cannot be read to its end is not called bad
            try:
                good = check.sound and _matches(check)
            finally:
                retired = self._end(check, good=good)
            if retired:
                self._tell(check)
            checked += Checked(page + check.slot.pages, 1, check.slot.length, int(not good))
        return checked

    def _begin(self, page: int, generation: int) -> _Check | None:
        """Pin a slot that is committed, or rests after it was; None when it does not hold ``generation`` any more."""
        with self._lock:
            slot = self._slots.pin(page, generation) or self._slots.pin_resting(page, generation)
            if slot is None:
                return None
            view = self._segment.payload[page * PAGE_BYTES :][: slot.length].data
            if len(view) < slot.length:  # the node is stopping, and has let go of its memory
                self._slots.unpin(slot)
                return None
            headers = self._headers.read(np.array([page], np.uint32))
            named = (int(headers.records["generation"][0]), int(headers.records["length"][0]))
            sound = named == (slot.generation, slot.length) and self._headers.is_sound(page)
        return _Check(slot, view, headers, sound)

    def _end(self, check: _Check, *, good: bool) -> bool:
        """Unpin the slot and retire one that is not ``good``; True if this call did."""
        slot = check.slot
        with self._lock:
            self._counters["checked_blocks"] += 1
            self._counters["checked_bytes"] += slot.length
            retired = not good and self._slots.retire(slot)
            if retired:
                self._counters["bad_blocks"] += 1
                self._headers.clear(slot.page)
            self._slots.unpin(slot)
        return retired

    def _tell(self, check: _Check) -> None:
        block = check.headers.records["hash"].tobytes()[:HASH_BYTES].hex()[:8]
        what = "payload" if check.sound else "header"
        log.error("bad_block", block=block, slot=check.slot.page, bad=what, bytes=check.slot.length)
        if check.sound:
            # With a bad header nobody can say which block it was; who looks for it here is told that it is gone.
            self._link.gone(self._segment.segment_id, check.headers)


def _matches(check: _Check) -> bool:
    """Whether the bytes have the checksum that the header gives."""
    [seed] = checksum_seeds(check.headers.records)
    return xxhash.xxh3_64_intdigest(check.view, seed) == int(check.headers.records["checksum"][0])
