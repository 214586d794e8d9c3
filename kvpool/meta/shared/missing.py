"""What a pool whose state is in Redis does not do yet: refused at the start, or by one clear error."""

from collections.abc import Collection, Mapping
from typing import NoReturn

from kvpool.core.errors import SettingsError, UsageError
from kvpool.ops.settings import MetaSettings
from kvpool.ops.tenant_settings import TenantSettings


def refuse_missing(settings: MetaSettings) -> None:
    """Raise SettingsError for a setting that would mean nothing with ``meta.state``."""
    if settings.policy != "lru":
        raise SettingsError(f"meta.policy is {settings.policy!r}; with meta.state only lru is there yet")
    if settings.tenants or settings.tenant_default != TenantSettings():
        name = "meta.tenants" if settings.tenants else "meta.tenant_default"
        raise SettingsError(f"{name} is set; with meta.state tenants have no limits yet: leave one of the two out")
    if settings.events_port is not None:
        raise SettingsError(
            f"meta.events_port is {settings.events_port}; with meta.state no events are published yet: leave one of "
            "the two out"
        )


class NoDrains:
    """Stands where a service in one process moves blocks between nodes."""

    def drain(self, node_id: str, timeout_s: float, *, stay: bool) -> NoReturn:  # noqa: ARG002
        """Refused; raises UsageError."""
        raise _no_drain(node_id)

    def progress(self, node_id: str) -> NoReturn:
        """Refused; raises UsageError."""
        raise _no_drain(node_id)

    def cancel(self, node_id: str) -> NoReturn:
        """Refused; raises UsageError."""
        raise _no_drain(node_id)


class NoQuotas:
    """Stands where a service in one process limits tenants."""

    def change(self, tenant: str, limits: Mapping[str, float], unlimited: Collection[str]) -> NoReturn:  # noqa: ARG002
        """Refused; raises UsageError."""
        raise UsageError(
            f"tenant {tenant!r} cannot be limited: with meta.state, a pool whose state is in Redis, tenants have no "
            "limits yet"
        )


def _no_drain(node_id: str) -> UsageError:
    return UsageError(
        f"node {node_id!r} cannot be drained: with meta.state, a pool whose state is in Redis, it does not copy blocks "
        "between nodes yet; stop the node, and its blocks return with it"
    )
