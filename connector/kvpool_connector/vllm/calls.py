"""The scheduler's calls to the pool, on threads of their own: the engine's loop waits for none of them.

Lookups run beside each other; reservations one after the other, because a block's parent must be reserved before it.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvpool import Keyspace, KvpoolError, Match, Reservation
from kvpool.client.breaker import Breaker
from kvpool_connector.vllm.link import PoolLink

LOOKUP_THREADS = 4
WAITING_MAX = 1_024
"""Calls of each kind that may be under way or wait; further ones fail at once, as those would that wait too long."""

FAILURES_MAX = 3
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A lookup's answer; ``failed`` where the pool could not be asked in time."""

    request_id: str
    number: int
    matched: int
    lease: int
    elapsed_s: float
    failed: bool


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation's answer; None where the pool could not be asked, with the reason."""

    number: int
    reservation: Reservation | None
    reason: str = ""


class PoolCalls:
    """Calls in the background. `answers` and `reservations` are filled by its threads. Close it.

    Args:
        link: The way to the pool.
        lease_s: Asked for with every lookup.
        lookup_timeout_s: Deadline of a lookup, from its start.
        call_timeout_s: Deadline of the other calls.
    """

    def __init__(self, link: PoolLink, lease_s: float, lookup_timeout_s: float, call_timeout_s: float) -> None:
        self.answers: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self.reservations: queue.SimpleQueue[Reserved] = queue.SimpleQueue()
        self._link = link
        self._lease_s = lease_s
        self._lookup_timeout_s = lookup_timeout_s
        self._call_timeout_s = call_timeout_s
        self._lookups = _Waiting(LOOKUP_THREADS, "kvpool-lookup")
        self._others = _Waiting(1, "kvpool-reserve")
        self._breaker = Breaker(time.monotonic, FAILURES_MAX, PAUSE_S)

    def available(self, *, queued: bool = False) -> bool:
        """Whether calls may be made: the pool has been reached, and did not fail several times in a row just now.

        After a pause one call tries. The others are refused until it has ended, but those ``queued`` behind it may go:
        a request's later blocks are of no use without its first ones.
        """
        if self._link.keyspace is None:
            return False
        return self._breaker.allows() or (queued and self._breaker.trying)

    def look_up(self, request_id: str, number: int, hashes: bytes) -> None:
        """Ask how much of the chain the pool holds; the answer comes to `answers`."""
        if not self._lookups.submit(partial(self._match, request_id, number, hashes, time.monotonic())):
            self.answers.put(Answered(request_id, number, 0, 0, 0.0, failed=True))

    def reserve(self, number: int, hashes: bytes, first: int) -> None:
        """Ask for places for the chain's blocks from ``first`` on; the answer comes to `reservations`."""
        deadline_s = time.monotonic() + self._call_timeout_s
        if not self._others.submit(partial(self._reserve, number, hashes, first, deadline_s)):
            self.reservations.put(Reserved(number, None, "too many calls wait for the pool"))

    def release(self, lease: int) -> None:
        """End a lease."""
        if lease:
            self._later(partial(Keyspace.release, matched=Match(0, None, lease)))

    def abort(self, reservation: Reservation, blocks: list[int], *, crowded: bool) -> None:
        """Give reserved blocks back, for every rank."""
        self._later(partial(Keyspace.abort, reservation=reservation, blocks=blocks, crowded=crowded))

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        self._lookups.close()
        self._others.close()

    def _match(self, request_id: str, number: int, hashes: bytes, started_s: float) -> None:
        left_s = started_s + self._lookup_timeout_s - time.monotonic()
        matched, failed = Match(0, None), True
        keyspace = self._link.keyspace
        if keyspace is not None and left_s > 0:
            try:
                with keyspace.tracer.span("kvpool.vllm.lookup", request_id=request_id):
                    matched = keyspace.match(hashes, lease_s=self._lease_s, timeout_s=left_s)
                failed = not matched.asked
            except KvpoolError:
                failed = True
            self._ended(failed=failed)
        elapsed_s = time.monotonic() - started_s
        self.answers.put(Answered(request_id, number, matched.blocks, matched.lease, elapsed_s, failed))

    def _reserve(self, number: int, hashes: bytes, first: int, deadline_s: float) -> None:
        # Of a silent pool's queue only the first waits: the blocks of all others are held meanwhile.
        keyspace, left_s = self._link.keyspace, deadline_s - time.monotonic()
        if keyspace is None or left_s <= 0:
            self.reservations.put(Reserved(number, None, "the pool is not reached in time"))
            return
        try:
            reservation = keyspace.reserve(hashes, first=first, timeout_s=left_s)
        except KvpoolError as error:
            self._ended(failed=True)
            self.reservations.put(Reserved(number, None, str(error)))
            return
        self._ended(failed=False)
        self.reservations.put(Reserved(number, reservation))

    def _later(self, call: Callable[..., object]) -> None:
        deadline_s = time.monotonic() + self._call_timeout_s

        def run() -> None:
            keyspace, left_s = self._link.keyspace, deadline_s - time.monotonic()
            if keyspace is not None and left_s > 0:
                try:
                    call(keyspace, timeout_s=left_s)
                except KvpoolError:
                    return  # leases and reservations run out by themselves

        self._others.submit(run)

    def _ended(self, *, failed: bool) -> None:
        if failed:
            self._breaker.failed()
        else:
            self._breaker.succeeded()


class _Waiting:
    """Threads with a queue that has an end."""

    def __init__(self, threads: int, name: str) -> None:
        self._free = threading.Semaphore(WAITING_MAX)
        self._executor = ThreadPoolExecutor(threads, name)

    def submit(self, call: Callable[[], object]) -> bool:
        """Make the call on one of the threads; False when too many wait for that."""
        if not self._free.acquire(blocking=False):
            return False
        self._executor.submit(call).add_done_callback(lambda _: self._free.release())
        return True

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
