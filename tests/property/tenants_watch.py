"""Holds every eviction for a writer against the rules of tenants, at the moment that it happens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpool.core.directory import Cause, Directory, TenantStats
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.namespace import Namespace

from .inspect_directory import BlockView, inspect, watch_evictions

ROUNDING = 1e-9


class TenantsWatch:
    """What one tenant's writes may do to the others, and what its quota lets it have.

    Args:
        directory: Watched from now on.
        may_go: Whether a leaf could be evicted.
    """

    def __init__(self, directory: Directory, may_go: Callable[[BlockView], bool]) -> None:
        self._directory = directory
        self._may_go = may_go
        self._writer: Namespace | None = None
        watch_evictions(directory, self._check_giver)

    @contextmanager
    def writing(self, namespace: Namespace) -> Iterator[None]:
        """A tenant writes, and comes no further above its quota by it."""
        before = self._tenants()[namespace.tenant].used_bytes
        self._writer = namespace
        yield
        self._writer = None
        own = self._tenants()[namespace.tenant]
        assert own.limits.bytes is None or own.used_bytes <= max(own.limits.bytes, before)

    def _check_giver(self, giver: str, cause: Cause) -> None:
        """Who gives a block is the most above its share of those that can, and above the writer."""
        writer = self._writer
        if writer is None or cause == Cause.SCATTERED:
            return
        if cause == Cause.QUOTA:
            assert giver == writer.tenant
            return
        levels = {name: tenant.used_bytes / tenant.limits.share for name, tenant in self._tenants().items()}
        slot_bytes = -(-writer.block_bytes // PAGE_BYTES) * PAGE_BYTES
        levels[writer.tenant] += slot_bytes / self._tenants()[writer.tenant].limits.share
        own = levels[writer.tenant]
        if giver != writer.tenant:
            assert levels[giver] > own * (1 - ROUNDING), "nobody gives to one that is more above its share"
        else:
            richer = {name for name, level in levels.items() if level > own * (1 + ROUNDING)}
            assert not self._can_give() & richer, "one that is more above its share gives first"

    def _can_give(self) -> set[str]:
        tenants = {namespace.id: namespace.tenant for namespace in self._directory.namespaces()}
        return {tenants[key[0]] for key, block in inspect(self._directory).items() if self._may_go(block)}

    def _tenants(self) -> dict[str, TenantStats]:
        return {tenant.name: tenant for tenant in self._directory.tenants()}
