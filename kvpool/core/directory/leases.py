"""Read leases: which blocks are held for whom, until when, and how many bytes that comes to.

A lease sits on the deepest matched block and covers its ancestors; it is charged for the blocks that its holder said it
has a use for. Leases on one block are charged once, the largest; charge and hold shrink when the last of them ends, so
that a lease costs the same however many wait for its block. Leases on different blocks that share ancestors are charged
for them once each: an upper bound, which is why the cap is enforced only while the pool is nearly full; before that a
lease keeps nobody out (docs/design/directory.md).
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvpool.core.directory.table import NEVER_US


@dataclass(slots=True)
class _Lease:
    row: int
    until_us: int
    size_bytes: int


@dataclass(slots=True)
class _Leased:
    """A row's leases, with the latest end and the largest size since it was last without."""

    numbers: set[int] = field(default_factory=set)
    until_us: int = NEVER_US
    size_bytes: int = 0


class LeaseLedger:
    """The live leases by number, and by row of the leased block; numbers follow ``last_number``."""

    def __init__(self, last_number: int = 0) -> None:
        self.held_bytes = 0
        self._leases: dict[int, _Lease] = {}
        self._by_row: dict[int, _Leased] = {}
        self._expiry: list[tuple[int, int]] = []
        self._last_number = last_number

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, row: int, size_bytes: int, until_us: int) -> int:
        """Lease the chain that ends in ``row``; the lease's number."""
        self._last_number += 1
        self._leases[self._last_number] = _Lease(row, until_us, size_bytes)
        heappush(self._expiry, (until_us, self._last_number))
        self._put(self._last_number, row)
        return self._last_number

    def row_of(self, number: int) -> int | None:
        """The row that a lease is on; None when it is over."""
        lease = self._leases.get(number)
        return None if lease is None else lease.row

    def release(self, number: int) -> int | None:
        """End a lease early; the row it was on, or None when it is over already."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return None
        leased = self._by_row[lease.row]
        leased.numbers.discard(number)
        if not leased.numbers:
            self.held_bytes -= leased.size_bytes
            del self._by_row[lease.row]
        return lease.row

    def expire(self, now_us: int) -> None:
        """Forget leases that have run out."""
        while self._expiry and self._expiry[0][0] <= now_us:
            self.release(heappop(self._expiry)[1])

    def charge(self, row: int) -> int:
        """Bytes charged for the leases on ``row``."""
        leased = self._by_row.get(row)
        return leased.size_bytes if leased is not None else 0

    def count(self, row: int) -> int:
        """Leases on ``row``."""
        leased = self._by_row.get(row)
        return len(leased.numbers) if leased is not None else 0

    def until_us(self, row: int) -> int:
        """How long the leases on ``row`` hold it."""
        leased = self._by_row.get(row)
        return leased.until_us if leased is not None else NEVER_US

    def move(self, row: int, ancestor: int) -> None:
        """The block goes: its leases pass to ``ancestor``, or end when that is no row."""
        leased = self._by_row.pop(row, None)
        if leased is None:
            return
        self.held_bytes -= leased.size_bytes
        for number in leased.numbers:
            if ancestor < 0:
                del self._leases[number]
            else:
                self._leases[number].row = ancestor
                self._put(number, ancestor)

    def check_integrity(self) -> None:
        """Assert that every lease is on its row and the charge is that of the rows."""
        assert self.held_bytes == sum(leased.size_bytes for leased in self._by_row.values())
        assert {n: row for row, leased in self._by_row.items() for n in leased.numbers} == {
            n: lease.row for n, lease in self._leases.items()
        }

    def _put(self, number: int, row: int) -> None:
        lease, leased = self._leases[number], self._by_row.setdefault(row, _Leased())
        leased.numbers.add(number)
        leased.until_us = max(leased.until_us, lease.until_us)
        self.held_bytes += max(0, lease.size_bytes - leased.size_bytes)
        leased.size_bytes = max(leased.size_bytes, lease.size_bytes)
