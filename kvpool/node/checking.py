"""Checks of what a node holds: slots are pinned one by one and their bytes compared with their headers.

Bad slots are retired, told to the directory, counted and logged. Who checks, and how fast, is decided in `scrub`.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from kvpool.core.directory import FETCHED
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES
from kvpool.core.slots import Slot, Slots
from kvpool.node.directory_link import DirectoryLink
from kvpool.node.headers import HeaderFile, SlotHeaders, checksum_seeds
from kvpool.node.segment import Segment
from kvpool.ops.logging import get_logger
from kvpool.ops.metrics import Latency

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
    """A pinned slot, with its bytes if they are in memory.

    ``sound`` says that its header is as it was written: else nobody knows what its bytes must be.
    """

    slot: Slot
    view: memoryview | None
    headers: SlotHeaders
    sound: bool


class Checks:
    """The checks of one store, whose parts and lock it shares. Thread-safe.

    Attributes:
        pages: Of the segment.
        time: How long it takes to compare a block.
    """

    def __init__(
        self,
        segment: Segment,
        headers: HeaderFile,
        slots: Slots,
        lock: threading.Lock,
        counters: "Counter[str]",
        link: DirectoryLink,
        on_read_error: Callable[[OSError, SlotHeaders], None],
    ) -> None:
        self.pages = segment.size_bytes // PAGE_BYTES
        self.time = Latency()
        self._segment = segment
        self._fetched = segment.medium in FETCHED
        self._headers = headers
        self._slots = slots
        self._lock = lock
        self._counters = counters
        self._link = link
        self._on_read_error = on_read_error
        self._stopped = False
        self._suspects: deque[tuple[int, int]] = deque(maxlen=SUSPECTS_MAX)

    def stop(self) -> None:
        """Check nothing more: the medium has failed. The lock is held."""
        self._stopped = True

    def cannot_be_read(self, page: int, generation: int, error: OSError) -> None:
        """The medium does not give a slot's bytes: retire it, and tell the directory."""
        check = self._begin(page, generation)
        if check is not None:
            self._judge(check, error)

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
            if self._stopped:
                return checked + Checked(self.pages)
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
            began_s = time.perf_counter()
            error: OSError | None = None
            good = True  # what cannot be read to its end is not called bad
            try:
                good = check.sound and _matches(check, self._bytes(check))
            except OSError as failure:
                error, good = failure, False
            finally:
                if good:
                    self._end(check, good=True)
            self.time.observe(time.perf_counter() - began_s)
            if not good:
                self._judge(check, error)
            checked += Checked(page + check.slot.pages, 1, check.slot.length, int(not good))
        return checked

    def _judge(self, check: _Check, error: OSError | None) -> None:
        """A slot is bad, or cannot be read: it is not served any more."""
        if self._end(check, good=False):
            self._tell(check)
        if error is not None:
            self._on_read_error(error, check.headers)

    def _bytes(self, check: _Check) -> memoryview:
        """What the medium itself holds now; raises OSError."""
        slot = check.slot
        return check.view if check.view is not None else self._segment.view(slot.page, slot.length)

    def _begin(self, page: int, generation: int) -> _Check | None:
        """Pin a slot that is committed, or rests after it was; None when it does not hold ``generation`` any more."""
        with self._lock:
            slot = self._slots.pin(page, generation) or self._slots.pin_resting(page, generation)
            if slot is None:
                return None
            view = None if self._fetched else self._segment.view(page, slot.length)
            if view is not None and len(view) < slot.length:  # the node is stopping, and has let go of its memory
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


def _matches(check: _Check, view: memoryview) -> bool:
    """Whether the bytes have the checksum that the header gives."""
    [seed] = checksum_seeds(check.headers.records)
    return xxhash.xxh3_64_intdigest(view, seed) == int(check.headers.records["checksum"][0])
