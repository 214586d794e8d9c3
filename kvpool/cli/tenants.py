"""How commands show tenants: what each holds, may hold, and was refused."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from kvpool.cli.output import table
from kvpool.core.units import format_size

if TYPE_CHECKING:
    from kvpool.client import TenantStatus

_COLUMNS = ("tenant", "#used", "#fair share", "#share", "#quota", "#pins", "#look-ups/s", "#writes/s", "refused")


def shows_tenants(tenants: Sequence["TenantStatus"]) -> bool:
    """Whether there is more to see than one tenant without limits: most pools have no others."""
    return len(tenants) > 1 or any(_limited(tenant) for tenant in tenants)


def tenants_table(tenants: Sequence["TenantStatus"]) -> Table:
    """A row for each."""
    return table(_COLUMNS, [_row(tenant) for tenant in tenants])


def _row(tenant: "TenantStatus") -> Sequence[object]:
    refused = ", ".join(f"{count:,} {what}" for what, count in sorted(tenant.refused.items()) if count)
    return (
        tenant.tenant,
        format_size(tenant.used_bytes),
        format_size(tenant.fair_bytes),
        f"{tenant.share:g}",
        "none" if tenant.quota_bytes is None else format_size(tenant.quota_bytes),
        f"{tenant.pins:,}" if tenant.pins_max is None else f"{tenant.pins:,} of {tenant.pins_max:,}",
        _rate(tenant.lookups_per_s),
        _rate(tenant.writes_per_s),
        refused or "nothing",
    )


def _limited(tenant: "TenantStatus") -> bool:
    limits = (tenant.quota_bytes, tenant.pins_max, tenant.lookups_per_s, tenant.writes_per_s)
    return any(limit is not None for limit in limits)


def _rate(per_s: float | None) -> str:
    return "none" if per_s is None else f"{per_s:,g}"
