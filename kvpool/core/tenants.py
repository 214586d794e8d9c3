"""What a tenant may hold and ask for."""

import math
from dataclasses import dataclass, fields

from kvpool.core.errors import UsageError
from kvpool.core.limits import PAGE_BYTES

SHARE_MAX = 1e6
RATE_PER_S_MAX = 1e9
COUNT_MAX = 1 << 62
NAME_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None is no limit.

    Attributes:
        bytes: Memory that its blocks may take, further copies included.
        share: Its weight when the pool is full and tenants compete for it.
        pins: Blocks that may be pinned at a time.
        lookups_per_s: Matches and locates.
        writes_per_s: New blocks.

    Raises:
        UsageError: A value that cannot be; names the limit, the value and the fix.
    """

    bytes: int | None = None
    share: float = 1.0
    pins: int | None = None
    lookups_per_s: float | None = None
    writes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check("bytes", self.bytes, PAGE_BYTES, COUNT_MAX, "one page or more, e.g. 64GiB")
        _check("pins", self.pins, 0, COUNT_MAX, "0 or more")
        for name in ("lookups_per_s", "writes_per_s"):
            _check(name, getattr(self, name), math.ulp(0.0), RATE_PER_S_MAX, "a rate above 0, e.g. 1000")
        if self.share is None or not 0 < self.share <= SHARE_MAX:
            raise UsageError(f"share is {self.share!r}; it must be above 0 and up to {SHARE_MAX:g}, and is usually 1")


def check_name(tenant: str) -> str:
    """``tenant``, if that can be its name; raises UsageError."""
    if not 0 < len(tenant) <= NAME_CHARACTERS_MAX:
        raise UsageError(f"a tenant's name has {len(tenant)} characters; it must have 1 to {NAME_CHARACTERS_MAX}")
    return tenant


def _check(name: str, value: float | None, least: float, most: float, fix: str) -> None:
    if value is not None and not least <= value <= most:
        raise UsageError(f"{name} is {value!r}; write {fix}, or none for no limit")


UNLIMITED = TenantLimits()
LIMITS = tuple(field.name for field in fields(TenantLimits))
"""Names of the limits."""
