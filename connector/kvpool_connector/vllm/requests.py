"""What is known of each request: its lookup, its load, and how far its blocks are saved. No I/O, no vLLM.

Methods are events; what they return is what to do. The clock is passed in. A chain is the hashes of a request's full
blocks from the root on; a request that generates grows its chain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvpool_connector.vllm.jobs import LoadJob, LoadReport

from kvpool.core.keys import split_hashes

NEGATIVE_S = 5.0
"""How long a block that failed to load is not asked for again, by any request."""

NEGATIVE_MAX = 4_096


class Wait(Enum):
    """Why a request must be asked about again."""

    LOOKUP = "its lookup is under way"
    LOAD = "another request loads the same blocks"


@dataclass(slots=True)
class Lookup:
    """A question to the pool, and its answer once that is here.

    Attributes:
        number: Unique; an answer to an older question is dropped.
        blocks: Blocks asked for.
        last: The last of their hashes.
        asked_s: When.
        matched: Leading blocks that the pool holds; None until it has answered.
        lease: The lease on them, 0 without one.
    """

    number: int
    blocks: int
    last: bytes
    asked_s: float
    matched: int | None = None
    lease: int = 0


@dataclass(slots=True)
class Tracked:
    """One request that has not finished.

    Attributes:
        lookup: The latest.
        plan: First block and end of the load that was offered, until it is allocated or offered anew.
        load: Number of the load under way.
        load_failed: Whether a load failed: none is offered again, or the request would never end (V7).
        saved: Blocks before this one are in the pool, or on their way.
    """

    lookup: Lookup | None = None
    plan: tuple[int, int] | None = None
    load: int | None = None
    load_failed: bool = False
    saved: int = 0


@dataclass(slots=True)
class Loading:
    """A load under way.

    Attributes:
        job: What the workers were given.
        lease: To release when it has ended.
        ranks_left: Ranks that have not reported.
        failed_from: Index in the job's blocks of the first that some rank did not load.
    """

    job: LoadJob
    lease: int
    ranks_left: int
    failed_from: int | None = None


class RequestBook:
    """All requests of an engine.

    Args:
        clock: Monotonic seconds.
        lookup_timeout_s: After this a lookup counts as a miss.
        lease_s: How long matched blocks are held; half of it later the question is asked again.
    """

    def __init__(self, clock: Callable[[], float], lookup_timeout_s: float, lease_s: float) -> None:
        self._clock = clock
        self._lookup_timeout_s = lookup_timeout_s
        self._lease_s = lease_s
        self._requests: dict[str, Tracked] = {}
        self._loads: dict[int, Loading] = {}
        self._loading: set[bytes] = set()
        self._bad_until_s: dict[bytes, float] = {}
        self._last_number = 0
        self.late_lookups = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def number(self) -> int:
        """A number that no other job or lookup of this engine has."""
        self._last_number += 1
        return self._last_number

    def added(self, request_id: str) -> None:
        """A request has come; one that is known already stays as it is."""
        self._requests.setdefault(request_id, Tracked())

    # Lookups

    def wants_lookup(self, request_id: str, chain: Sequence[bytes]) -> bool:
        """Whether to ask the pool: never yet, for another chain, or so long ago that the lease is nearly over."""
        tracked = self._requests[request_id]
        if not chain or tracked.load_failed or tracked.load is not None:
            return False
        lookup = tracked.lookup
        if lookup is None or lookup.blocks != len(chain) or lookup.last != chain[-1]:
            return True
        return lookup.matched is not None and self._clock() - lookup.asked_s > self._lease_s / 2

    def asked_pool(self, request_id: str, chain: Sequence[bytes]) -> tuple[Lookup, int]:
        """A lookup goes out; it, and the lease that it supersedes (0: none)."""
        tracked = self._requests[request_id]
        superseded = tracked.lookup.lease if tracked.lookup else 0
        tracked.lookup = Lookup(self.number(), len(chain), chain[-1], self._clock())
        return tracked.lookup, superseded

    def pool_answered(self, request_id: str, number: int, matched: int, lease: int) -> int:
        """An answer is here; the lease to release at once, because nobody waits for it any more (0: none)."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.lookup is None or tracked.lookup.number != number:
            return lease
        tracked.lookup.matched = matched
        tracked.lookup.lease = lease
        return 0

    def offer(self, request_id: str, chain: Sequence[bytes], local_blocks: int) -> int | Wait:
        """Blocks beyond ``local_blocks`` that can be loaded, or why that cannot be said yet.

        Asking again changes nothing but the plan, which is that of the last answer.
        """
        tracked = self._requests[request_id]
        tracked.plan = None
        lookup = tracked.lookup
        if tracked.load_failed or tracked.load is not None or lookup is None:
            return 0
        if lookup.matched is None:
            if self._clock() - lookup.asked_s <= self._lookup_timeout_s:
                return Wait.LOOKUP
            lookup.matched, lookup.number = 0, -1  # an answer that comes now is nobody's
            self.late_lookups += 1
        matched = self._without_bad(chain, local_blocks, min(lookup.matched, len(chain)))
        if matched <= local_blocks:
            return 0
        if chain[local_blocks] in self._loading:
            return Wait.LOAD
        tracked.plan = (local_blocks, matched)
        return matched - local_blocks

    def withdraw(self, request_id: str) -> None:
        """What was offered is not offered after all."""
        self._requests[request_id].plan = None

    # Loads

    def allocated(
        self, request_id: str, chain: Sequence[bytes], block_ids: Sequence[int], external_blocks: int, ranks: int
    ) -> LoadJob | None:
        """The request got its blocks; the load to begin, if any of them are to be loaded."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            tracked = self._requests[request_id] = Tracked()
        plan, tracked.plan = tracked.plan, None
        lookup = tracked.lookup
        if tracked.load is None and lookup is not None and lookup.matched is not None:
            # What was saved and has been evicted since shows when a later block misses its ancestor.
            tracked.saved = max(tracked.saved, min(lookup.matched, len(chain)))
        if not external_blocks:
            return None
        first = plan[0] if plan else 0
        end = first + external_blocks
        # Without the plan that led here nothing is known to be there: an empty chain fails, and is recomputed.
        known = plan is not None and end <= min(plan[1], len(chain))
        hashes = b"".join(chain[:end]) if known else b""
        job = LoadJob(self.number(), request_id, hashes, first, list(block_ids[first:end]))
        self._loads[job.number] = Loading(job, self.take_lease(request_id), ranks)
        self._loading.update(_split(job))
        tracked.load = job.number
        return job

    def take_lease(self, request_id: str) -> int:
        """The lease of the request's lookup, which is the caller's from now on (0: none)."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.lookup is None:
            return 0
        lease, tracked.lookup.lease = tracked.lookup.lease, 0
        return lease

    def load_reported(self, number: int, report: LoadReport) -> Loading | None:
        """One rank's load has ended; the whole load, when this was the last rank."""
        loading = self._loads.get(number)
        if loading is None:
            return None
        loading.ranks_left -= 1
        if report.failed_from is not None:
            known = loading.failed_from
            loading.failed_from = report.failed_from if known is None else min(known, report.failed_from)
            self._load_failed(loading, report)
        if loading.ranks_left:
            return None
        del self._loads[number]
        self._loading.difference_update(_split(loading.job))
        tracked = self._requests.get(loading.job.request_id)
        if tracked is not None and tracked.load == number:
            tracked.load = None
        return loading

    # Saves

    def unsaved(self, request_id: str, full_blocks: int) -> range:
        """Blocks of the request that are computed and not saved: ``full_blocks`` are whole and final."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.load is not None:
            return range(0)
        return range(tracked.saved, full_blocks)

    def saving(self, request_id: str, end: int) -> None:
        """Blocks before ``end`` are on their way."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.saved = max(tracked.saved, end)

    def finished(self, request_id: str) -> int:
        """The request leaves, in whatever state; the lease to release (0: none, or a load still needs it)."""
        lease = self.take_lease(request_id)
        self._requests.pop(request_id, None)
        return lease

    def forget_lookups(self) -> None:
        """The namespace has changed: nothing that was found holds any more."""
        for tracked in self._requests.values():
            tracked.lookup, tracked.plan, tracked.saved = None, None, 0

    def check_integrity(self) -> None:
        """Assert that requests and loads agree; for tests."""
        assert self._loading == {h for loading in self._loads.values() for h in _split(loading.job)}
        for request_id, tracked in self._requests.items():
            if tracked.load is not None:
                assert self._loads[tracked.load].job.request_id == request_id
        assert all(loading.ranks_left > 0 for loading in self._loads.values())

    def _load_failed(self, loading: Loading, report: LoadReport) -> None:
        tracked = self._requests.get(loading.job.request_id)
        failed = loading.job.first + (report.failed_from or 0)
        if tracked is not None:
            tracked.load_failed = True
            tracked.saved = min(tracked.saved, failed)
        bad = _split(loading.job)[failed - loading.job.first :][:1]
        if len(self._bad_until_s) >= NEGATIVE_MAX:
            self._bad_until_s.clear()
        self._bad_until_s.update(dict.fromkeys(bad, self._clock() + NEGATIVE_S))

    def _without_bad(self, chain: Sequence[bytes], first: int, end: int) -> int:
        """``end``, or the first block that failed to load a moment ago."""
        if not self._bad_until_s:
            return end
        now_s = self._clock()
        for block in range(first, end):
            if self._bad_until_s.get(chain[block], now_s) > now_s:
                return block
        return end


def _split(job: LoadJob) -> list[bytes]:
    """The hashes of the blocks that the job loads."""
    return split_hashes(job.hashes)[job.first :]
