"""What callers use, for the audit trail: blocks located and reserved, with their bytes, in sums for each caller."""

from kvpool.core.directory import Want
from kvpool.core.errors import KvpoolError
from kvpool.core.principals import Principal
from kvpool.meta.serving import Serving
from kvpool.ops.audit import Audit


class Uses:
    """Tells an audit trail of uses; costs next to nothing where there is none. Thread-safe.

    Args:
        service: Knows the namespaces.
        audit: Is told.
    """

    def __init__(self, service: Serving, audit: Audit) -> None:
        self._service = service
        self._audit = audit
        self._block_bytes: dict[bytes, int] = {}

    def located(self, principal: Principal, namespace_id: bytes, blocks: int) -> None:
        """The caller was told where blocks lie: it loads them."""
        if blocks and self._audit.is_on:
            size_bytes = blocks * self._bytes_of(namespace_id)
            self._audit.used(principal, located_blocks=blocks, located_bytes=size_bytes)

    def reserved(self, principal: Principal, namespace_id: bytes, wants: bytes) -> None:
        """The caller was given places for blocks: it stores them."""
        blocks = wants.count(Want.WANTED) if self._audit.is_on else 0
        if blocks:
            size_bytes = blocks * self._bytes_of(namespace_id)
            self._audit.used(principal, stored_blocks=blocks, stored_bytes=size_bytes)

    def dropped(self, principal: Principal) -> None:
        """A block was dropped, since the caller said that it is bad or gone."""
        self._audit.used(principal, dropped_blocks=1)

    def _bytes_of(self, namespace_id: bytes) -> int:
        """Bytes of a block, all its shards."""
        known = self._block_bytes.get(namespace_id)
        if known is None:
            try:
                namespace = self._service.namespace(namespace_id)
            except KvpoolError:  # forgotten meanwhile, or the shared state is away
                return 0
            known = self._block_bytes[namespace_id] = namespace.block_bytes * namespace.shards
        return known
