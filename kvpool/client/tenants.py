"""What operators learn of a tenant."""

from dataclasses import dataclass
from typing import Self

from kvpool.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What one tenant may hold, holds, and was refused; None is no limit.

    Attributes:
        tenant: Its name.
        used_bytes: Memory that its blocks take, further copies included.
        fair_bytes: What its share comes to among the tenants that hold something now.
        disk_used_bytes: Beside ``used_bytes``, on disk.
        pins: Blocks pinned.
        quota_bytes: Memory that its blocks may take.
        share: Its weight when the pool is full and tenants compete for it.
        pins_max: Blocks that may be pinned.
        lookups_per_s: Look-ups a second; more are misses.
        writes_per_s: New blocks a second; more are not wanted.
        refused: How often it was refused since the service's start: bytes (blocks over the quota), pins, lookups,
            writes (blocks over the rate).
    """

    tenant: str
    used_bytes: int
    fair_bytes: int
    disk_used_bytes: int
    pins: int
    quota_bytes: int | None
    share: float
    pins_max: int | None
    lookups_per_s: float | None
    writes_per_s: float | None
    refused: dict[str, int]

    @classmethod
    def of(cls, message: admin_pb2.TenantStatus) -> Self:
        """As the service tells it."""
        limits = {field.name: value for field, value in message.limits.ListFields()}
        return cls(
            tenant=message.tenant,
            used_bytes=message.used_bytes,
            fair_bytes=message.fair_bytes,
            disk_used_bytes=message.disk_used_bytes,
            pins=message.pins,
            quota_bytes=limits.get("bytes"),
            share=limits["share"],
            pins_max=limits.get("pins"),
            lookups_per_s=limits.get("lookups_per_s"),
            writes_per_s=limits.get("writes_per_s"),
            refused=dict(message.refused),
        )
