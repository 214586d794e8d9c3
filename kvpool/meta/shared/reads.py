"""Read grants of a pool whose state is shared: any service seals them, since all know every session's key."""

from kvpool.core.errors import StateAwayError
from kvpool.meta.shared.keeper import Keeper
from kvpool.transport.wire.messages import ReadGrants


class SharedReads:
    """See `kvpool.meta.read_granting.ReadGranting`; each epoch has one. Thread-safe.

    Args:
        keeper: Knows the epoch.

    Attributes:
        is_on: Whether nodes ask for grants: where callers are authenticated. Without it nobody is given any.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.is_on = False
        self._keeper = keeper

    def since(self, namespace_id: bytes, known_version: int) -> ReadGrants | None:
        """See `ReadGranting.since`; none while the state is away: then what was located cannot be read either."""
        if not self.is_on:
            return None
        try:
            return self._keeper.usable().reads.since(namespace_id, known_version)
        except StateAwayError:
            return None
