"""What each tenant holds and was refused, and who gives first when the pool is full.

A block belongs to the tenant that its namespace names. When room is needed, the tenant gives whose bytes are the most
for its share; so tenants that compete end with bytes in proportion to their shares, what one does not use is the
others', and whoever is within its share loses nothing to one that is above.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvpool.core.clock import Clock
from kvpool.core.directory.table import view
from kvpool.core.errors import CapacityError
from kvpool.core.limits import NAMESPACES_MAX
from kvpool.core.rates import TokenBucket
from kvpool.core.tenants import UNLIMITED, TenantLimits

NAMED_MAX = NAMESPACES_MAX
"""Tenants with limits of their own: each may then have a namespace."""

BYTES, PINS, LOOKUPS, WRITES = "bytes", "pins", "lookups", "writes"
REFUSALS = (BYTES, PINS, LOOKUPS, WRITES)
"""What tenants are refused for: blocks over the quota, pins, look-ups, blocks over the rate."""


@dataclass(slots=True)
class Account:
    """One tenant.

    Attributes:
        number: The directory's short name for it.
        limits: In force now.
        pins: Blocks pinned.
        refused: How often it was refused, by `REFUSALS`.
        lookups: Its look-ups to come; None: no limit.
        writes: Its new blocks to come; None: no limit.
    """

    number: int
    name: str
    limits: TenantLimits = UNLIMITED
    pins: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lookups: TokenBucket | None = None
    writes: TokenBucket | None = None


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant may hold, holds, and was refused, at one moment.

    Attributes:
        fair_bytes: Memory that its share comes to while the tenants that hold something now compete.
        used_bytes: Memory that its blocks take, further copies included.
        disk_used_bytes: Beside it, on disk.
        refused: By `REFUSALS`, since the service's start.
    """

    name: str
    limits: TenantLimits
    fair_bytes: int
    used_bytes: int
    disk_used_bytes: int
    pins: int
    refused: dict[str, int]


class Tenants:
    """The accounts, and the limits of tenants by name, whether they have come or not.

    Attributes:
        memory: Bytes in memory by tenant, promised ones and surplus copies included.
        disk: Bytes on disk.
        surplus: Bytes of the surplus copies in memory.
        accounts: By number.
    """

    def __init__(self, clock: Clock, limits: Mapping[str, TenantLimits], default: TenantLimits) -> None:
        self.memory = array("q")
        self.disk = array("q")
        self.surplus = array("q")
        self.accounts: list[Account] = []
        self._per_share = array("d")
        self._quota_bytes: list[int | None] = []
        self._by_name: dict[str, Account] = {}
        self._limits = dict(limits)
        self._default = default
        self._clock = clock

    def account(self, name: str) -> Account:
        """The account of a tenant, opened with its first namespace."""
        account = self._by_name.get(name)
        if account is None:
            account = self._by_name[name] = Account(len(self.accounts), name)
            self.accounts.append(account)
            for column in (self.memory, self.disk, self.surplus):
                column.append(0)
            self._per_share.append(1.0)
            self._quota_bytes.append(None)
            self._apply(account, self.limits(name))
        return account

    def limits(self, name: str) -> TenantLimits:
        """The limits of a tenant, its own or those of all that have none."""
        return self._limits.get(name, self._default)

    def set_limits(self, name: str, limits: TenantLimits) -> None:
        """Give a tenant limits of its own; raises CapacityError when too many have some."""
        if name not in self._limits and len(self._limits) >= NAMED_MAX:
            raise CapacityError(f"{NAMED_MAX} tenants have limits of their own, the most there can be; use the default")
        self._limits[name] = limits
        account = self._by_name.get(name)
        if account is not None:
            self._apply(account, limits)

    def stats(self, capacity_bytes: int) -> list[TenantStats]:
        """All tenants that have come or have limits of their own, by name."""
        shares = sum(a.limits.share for a in self.accounts if self.memory[a.number])
        names = sorted({*self._by_name, *self._limits})
        return [self._stats(name, capacity_bytes, shares) for name in names]

    def room_bytes(self, owner: int) -> int | None:
        """Memory that a tenant may take yet, below 0 when its quota was lowered; None for no limit."""
        quota_bytes = self._quota_bytes[owner]
        return None if quota_bytes is None else quota_bytes - self.memory[owner]

    def over_quota(self) -> list[int]:
        """Tenants that hold more than they may."""
        return [account.number for account in self.accounts if (self.room_bytes(account.number) or 0) < 0]

    def givers(self, used: "array[int]", taker: int, size_bytes: int) -> Iterable[int]:
        """Who may have to give room to ``taker``, the tenant first that is the most above its share, it itself last.

        Whoever has no more for its share than the taker would have gives nothing.

        Args:
            used: `memory` or `disk`.
            taker: Who wants room.
            size_bytes: How much.
        """
        return self._givers(used, taker, size_bytes) if len(self.accounts) > 1 else (taker,)

    def _givers(self, used: "array[int]", taker: int, size_bytes: int) -> Iterator[int]:
        levels = view(used) * view(self._per_share)
        level = (used[taker] + size_bytes) * self._per_share[taker]
        levels[taker] = level
        first = int(levels.argmax())
        if levels[first] > level:
            yield first
            above = np.flatnonzero(levels > level)
            order = np.argsort(-levels[above], kind="stable")
            yield from (other for other in above[order].tolist() if other != first)
        yield taker

    def _apply(self, account: Account, limits: TenantLimits) -> None:
        account.limits = limits
        self._per_share[account.number] = 1.0 / limits.share
        self._quota_bytes[account.number] = limits.bytes
        account.lookups = TokenBucket(limits.lookups_per_s, self._clock) if limits.lookups_per_s else None
        account.writes = TokenBucket(limits.writes_per_s, self._clock) if limits.writes_per_s else None

    def _stats(self, name: str, capacity_bytes: int, shares: float) -> TenantStats:
        limits, account = self.limits(name), self._by_name.get(name)
        held_bytes = self.memory[account.number] if account is not None else 0
        fair_bytes = int(capacity_bytes * limits.share / (shares if held_bytes else shares + limits.share))
        if account is None:
            return TenantStats(name, limits, fair_bytes, 0, 0, 0, dict.fromkeys(REFUSALS, 0))
        disk_bytes, refused = self.disk[account.number], {what: account.refused[what] for what in REFUSALS}
        return TenantStats(name, limits, fair_bytes, held_bytes, disk_bytes, account.pins, refused)
