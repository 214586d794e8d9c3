"""What a follower knows of a pool, and up to which message: decides whether the next message fits, and does no I/O."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from kvpool.transport.wire.events import AllBlocksCleared, BlockStored, Event, SnapshotPart, namespace_of


class Fit(Enum):
    """How a message fits what is known."""

    NEXT = auto()
    OLD = auto()
    """Known already."""
    GAP = auto()
    """Messages before it are missing."""


class PoolIndex:
    """The blocks that can be loaded, by namespace id.

    Attributes:
        namespaces: Hashes of blocks; a namespace without any is not there.
        incarnation: Of the service that this is known from; 0: nothing is known yet, and a snapshot is due.
        expected: Sequence number of the next message.
    """

    def __init__(self) -> None:
        self.namespaces: dict[bytes, set[bytes]] = {}
        self.incarnation = 0
        self.expected = 0

    @property
    def blocks(self) -> int:
        """How many there are."""
        return sum(map(len, self.namespaces.values()))

    def prefix(self, namespace_id: bytes, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain can be loaded: what a router asks. A block is held with all above it."""
        known = self.namespaces.get(namespace_id, set())
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in known)  # noqa: FBT003 - a key's value

    def fit(self, sequence: int) -> Fit:
        """How a message with this number fits."""
        if sequence == self.expected:
            return Fit.NEXT
        return Fit.OLD if sequence < self.expected else Fit.GAP

    def advance(self, events: Iterable[Event]) -> None:
        """Take in the next message."""
        self._apply(events)
        self.expected += 1

    def restart(self, parts: list[SnapshotPart]) -> None:
        """Take in a snapshot, in place of all that was known; messages after its first part go on top."""
        self.namespaces.clear()
        self.incarnation, self.expected = parts[0].incarnation, parts[0].sequence + 1
        for part in parts:
            self._apply(part.events)

    def _apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.namespaces.clear()
                continue
            namespace = namespace_of(event)
            known = self.namespaces.setdefault(namespace, set())
            if isinstance(event, BlockStored):
                known.update(event.block_hashes)
            else:
                known.difference_update(event.block_hashes)
            if not known:
                del self.namespaces[namespace]
