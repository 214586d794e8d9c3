"""The directory's rules as an operator has set them."""

from kvpool.core.directory import LEASE_MARGIN_S, DirectoryConfig
from kvpool.ops.settings import MetaSettings


def directory_config(settings: MetaSettings, epoch: int) -> DirectoryConfig:
    """The configuration for a directory whose numbers begin with ``epoch``."""
    return DirectoryConfig(
        policy=settings.policy,
        lease_cap=settings.lease_cap,
        tombstones=settings.tombstones,
        spare_s=settings.lease_max_s + LEASE_MARGIN_S,
        epoch=epoch,
        replicas_max=settings.replicas_max,
        replica_read_rate=settings.replica_read_rate,
        replica_budget=settings.replica_budget,
        tenants={name: tenant.limits for name, tenant in settings.tenants.items()},
        tenant_default=settings.tenant_default.limits,
    )
