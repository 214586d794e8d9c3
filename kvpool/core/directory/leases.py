"""How many bytes read leases may hold, so that a queue of waiting requests cannot pin the pool.

A lease sits on the deepest matched block and covers its ancestors; it is charged for the blocks that its holder said it
has a use for. Leases that share blocks are charged for them once each: an upper bound, which is why the cap is enforced
only while the pool is nearly full; before that a lease keeps nobody out (docs/design/directory.md).
"""

from heapq import heappop, heappush


class LeaseLedger:
    """Charges of the live leases, by row of the leased block."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._charges: dict[int, tuple[int, int]] = {}
        self._expiry: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._charges)

    def expire(self, now_us: int) -> None:
        """Forget leases that have run out."""
        while self._expiry and self._expiry[0][0] <= now_us:
            until_us, row = heappop(self._expiry)
            if self._charges.get(row, (0, 0))[0] == until_us:
                self.drop(row)

    def charge(self, row: int) -> int:
        """Bytes already charged for a live lease on ``row``."""
        return self._charges.get(row, (0, 0))[1]

    def grant(self, row: int, size_bytes: int, until_us: int) -> None:
        """Lease the chain that ends in ``row``: of two leases on it the later end and the larger charge count."""
        old_until_us, old_bytes = self._charges.get(row, (0, 0))
        charged_bytes = max(old_bytes, size_bytes)
        self.held_bytes += charged_bytes - old_bytes
        self._charges[row] = (max(old_until_us, until_us), charged_bytes)
        if until_us > old_until_us:
            heappush(self._expiry, (until_us, row))

    def drop(self, row: int) -> None:
        """The block is gone, or its lease has run out."""
        self.held_bytes -= self._charges.pop(row, (0, 0))[1]
