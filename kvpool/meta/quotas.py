"""Limits of tenants in a running service: changed by operators, enforced on what is there, and said in the log."""

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace

from kvpool.core.clock import Clock
from kvpool.core.directory import Directory, TenantStats
from kvpool.core.errors import UsageError
from kvpool.core.tenants import LIMITS, check_name
from kvpool.ops.logging import get_logger
from kvpool.v1 import admin_pb2

TRIM_BLOCKS = 512
TRIM_PAUSE_S = 0.001
"""What is above a quota goes so many blocks at a time, with pauses in which others get the lock."""

LOG_EVERY_S = 60.0
"""A tenant that is refused is named in the log so often at most."""

log = get_logger(__name__)


class Quotas:
    """See the module. Thread-safe.

    Args:
        directory: Guarded by ``lock``.
        lock: The service's.
        clock: Monotonic seconds.
        work: Set when a tenant may be above its quota.
    """

    def __init__(self, directory: Directory, lock: threading.Lock, clock: Clock, work: threading.Event) -> None:
        self._directory = directory
        self._lock = lock
        self._clock = clock
        self._work = work
        self._logged: dict[str, Counter[str]] = {}
        self._log_again_s = clock() + LOG_EVERY_S

    def change(self, tenant: str, limits: Mapping[str, float], unlimited: Collection[str]) -> TenantStats:
        """Change the named limits of a tenant and lift the ``unlimited`` ones, until the service restarts.

        Raises:
            UsageError: A limit that there is not, or a value or name that cannot be.
            CapacityError: Too many tenants have limits of their own.
        """
        check_name(tenant)
        if both := limits.keys() & set(unlimited):
            raise UsageError(f"{', '.join(sorted(both))} of {tenant!r} is set and lifted at once; do either")
        for name in unlimited:
            if name not in LIMITS or name == "share":
                known = ", ".join(limit for limit in LIMITS if limit != "share")
                raise UsageError(f"there is no limit {name!r} to lift; use one of {known}")
        with self._lock:
            before = self._directory.limits(tenant)
            after = replace(before, **dict.fromkeys(unlimited), **limits)  # type: ignore[arg-type]
            self._directory.set_limits(tenant, after)
            stats = next(stats for stats in self._directory.tenants() if stats.name == tenant)
        log.info("quota_changed", tenant=tenant, **asdict(after))
        self._work.set()
        return stats

    def tick(self) -> None:
        """Evict what is above a quota, and log who was refused."""
        while self._trim():
            time.sleep(TRIM_PAUSE_S)
        if self._clock() >= self._log_again_s:
            self._log_again_s = self._clock() + LOG_EVERY_S
            with self._lock:
                tenants = self._directory.tenants()
            for tenant in tenants:
                self._log(tenant)

    def _trim(self) -> bool:
        with self._lock:
            return self._directory.trim(TRIM_BLOCKS)

    def _log(self, tenant: TenantStats) -> None:
        refused, known = Counter(tenant.refused), self._logged.get(tenant.name, Counter())
        if refused != known:
            log.warning("tenant_refused", tenant=tenant.name, seconds=LOG_EVERY_S, **(refused - known))
            self._logged[tenant.name] = refused


def limits_named(request: admin_pb2.SetQuotaRequest) -> dict[str, float]:
    """The limits that a request changes, by name."""
    return {field.name: value for field, value in request.ListFields() if field.name in LIMITS}


def tenant_message(tenant: TenantStats, *, alone: bool = False) -> admin_pb2.TenantStatus:
    """What gRPC tells of a tenant; ``alone``, to itself: its fair part would say how many others hold something."""
    return admin_pb2.TenantStatus(
        tenant=tenant.name,
        limits=admin_pb2.TenantLimits(**asdict(tenant.limits)),
        fair_bytes=0 if alone else tenant.fair_bytes,
        used_bytes=tenant.used_bytes,
        disk_used_bytes=tenant.disk_used_bytes,
        pins=tenant.pins,
        refused=tenant.refused,
    )
