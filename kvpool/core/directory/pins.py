"""Pins: blocks that operators keep from eviction, counted by tenant."""

from heapq import heappop, heappush

from kvpool.core.clock import FOREVER_US
from kvpool.core.directory.table import BlockTable
from kvpool.core.directory.tenants import PINS, Tenants
from kvpool.core.errors import QuotaError


class Pins:
    """The pins on `BlockTable.pinned_until_us`; whoever sets or clears one there does it through this class."""

    def __init__(self, blocks: BlockTable, tenants: Tenants) -> None:
        self._blocks = blocks
        self._tenants = tenants
        self._expiry: list[tuple[int, int]] = []

    def pin(self, row: int, until_us: int) -> None:
        """Pin ``row`` until then, in place of an earlier pin; raises QuotaError."""
        if row not in self._blocks.pinned_until_us:
            account = self._tenants.accounts[self._blocks.owner(row)]
            most = account.limits.pins
            if most is not None and account.pins >= most:
                account.refused[PINS] += 1
                raise QuotaError(
                    f"tenant {account.name!r} has {account.pins} blocks pinned, and its quota is {most}; unpin some, "
                    f"or raise it with `kvpool quota {account.name} --pins {most + 1}`"
                )
            account.pins += 1
        self._blocks.pinned_until_us[row] = until_us
        if until_us < FOREVER_US:
            heappush(self._expiry, (until_us, row))

    def unpin(self, row: int) -> bool:
        """The pin ends, or its block goes; False for a block without one."""
        if self._blocks.pinned_until_us.pop(row, None) is None:
            return False
        self._tenants.accounts[self._blocks.owner(row)].pins -= 1
        return True

    def expire(self, now_us: int) -> None:
        """Forget pins that have run out."""
        while self._expiry and self._expiry[0][0] <= now_us:
            until_us, row = heappop(self._expiry)
            if self._blocks.pinned_until_us.get(row) == until_us:
                self.unpin(row)

    def check_integrity(self) -> None:
        """Assert that each tenant's count is that of its pinned blocks."""
        owners = [self._blocks.owner(row) for row in self._blocks.pinned_until_us]
        assert [account.pins for account in self._tenants.accounts] == [
            owners.count(account.number) for account in self._tenants.accounts
        ]
