"""What people look at of a directory in Redis: what each namespace holds."""

from typing import NoReturn

from kvpool.core.directory import NamespaceUsage
from kvpool.core.errors import UsageError
from kvpool.core.limits import NAMESPACES_MAX
from kvpool.meta.store.lookups import Lookups
from kvpool.meta.store.pool import Known, Pool
from kvpool.meta.store.usage import NamespaceStats, Usage


class RedisView:
    """See `kvpool.core.directory.viewing.View`, of which it is a part."""

    def __init__(self, pool: Pool, usage: Usage, lookups: Lookups) -> None:
        self._pool = pool
        self._usage = usage
        self._lookups = lookups

    def usage(self, begin: int = 0, most: int = NAMESPACES_MAX) -> list[NamespaceUsage]:
        """See `View.usage`; what was asked for and moved is of this service alone."""
        self._pool.read_namespaces()
        wanted = self._pool.all_known()[begin : begin + most]
        every = zip(wanted, self._usage.stats_of(wanted), strict=True)
        return [self._of(known, stats) for known, stats in every]

    def block(self, namespace_id: bytes, block_hash: bytes) -> NoReturn:  # noqa: ARG002
        """Refused; raises UsageError."""
        raise UsageError(
            f"block {block_hash.hex()[:8]} cannot be shown: with meta.state, a directory in Redis, single blocks are "
            "not shown yet; `kvpool explain` tells why a block can or cannot be matched"
        )

    def _of(self, known: Known, stats: NamespaceStats) -> NamespaceUsage:
        size_bytes = stats.blocks * stats.slot_bytes * known.namespace.shards
        return NamespaceUsage(known.namespace, stats.blocks, size_bytes, *self._lookups.of(known.namespace.id))
