"""Why was it a miss: a bounded memory of blocks that left the directory."""

from collections import OrderedDict
from enum import StrEnum
from typing import NamedTuple


class MissReason(StrEnum):
    """The closed set of reasons for a miss; every counter, `explain` and result uses these words."""

    COLD = "cold"
    EVICTED = "evicted"
    EXPIRED = "expired"
    WRONG_NAMESPACE = "wrong_namespace"
    HASH_MISMATCH = "hash_mismatch"
    NODE_DOWN = "node_down"
    VERIFY_FAILED = "verify_failed"
    OVER_DEADLINE = "over_deadline"
    OVERLOADED = "overloaded"
    """The metadata service refused the call: it has too many at a time."""
    NOT_WORTH_LOADING = "not_worth_loading"
    RECOVERING = "recovering"
    QUOTA = "quota"
    """The tenant has asked more often than it may."""
    PARENT_MISSING = "parent_missing"
    """The block is stored, but an ancestor is not: it cannot be matched until that comes back."""
    IN_FLIGHT = "in_flight"
    """The block is being written."""


class Cause(StrEnum):
    """What made a block leave: finer than its `MissReason`."""

    ROOM = "room"
    """The pool was full, and the block the oldest leaf of the tenant whose turn it was."""
    QUOTA = "quota"
    """Its tenant had more than its quota, and gave its oldest leaf."""
    SCATTERED = "scattered"
    """Its node had the bytes for a new block, but no extent long enough."""
    DEADLINE = "deadline"
    """Its writer did not finish in time."""
    ABORTED = "aborted"
    """Its writer gave it up."""
    GONE = "gone"
    """Its node no longer has it."""
    NODE_LOST = "node_lost"
    READER = "reader"
    """A reader's checksum did not match."""
    SCRUB = "scrub"
    """Its node found the bytes changed."""


_USUAL_CAUSES = {
    MissReason.EVICTED: Cause.ROOM,
    MissReason.EXPIRED: Cause.DEADLINE,
    MissReason.NODE_DOWN: Cause.NODE_LOST,
    MissReason.VERIFY_FAILED: Cause.READER,
}


class Tombstone(NamedTuple):
    """One block, or shard of it, that left: why, and when on the directory's clock.

    Attributes:
        reason: What a match says.
        at_us: When.
        given_cause: What made it leave, where that is not the usual cause.
        node: Which node it was on; empty for one that was on none.
        last_use_us: When it was last used.
        used_bytes: Of the pool, then.
        capacity_bytes: Of the pool, then.
    """

    reason: MissReason
    at_us: int
    given_cause: Cause | None = None
    node: str = ""
    last_use_us: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0

    @property
    def cause(self) -> Cause | None:
        """What made it leave."""
        return self.given_cause or _USUAL_CAUSES.get(self.reason)


class Tombstones:
    """The last ``size`` blocks that left; the oldest are forgotten first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ring: OrderedDict[tuple[int, bytes], Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def full(self) -> bool:
        """Whether older ones have been forgotten, or will be next."""
        return len(self._ring) >= self._size

    def oldest_us(self) -> int | None:
        """When the oldest block that is remembered left."""
        return next(iter(self._ring.values())).at_us if self._ring else None

    def bury(self, namespace: int, block_hash: bytes, tombstone: Tombstone) -> None:
        """Remember that the block left."""
        key = (namespace, block_hash)
        self._ring.pop(key, None)
        self._ring[key] = tombstone
        if len(self._ring) > self._size:
            self._ring.popitem(last=False)

    def find(self, namespace: int, block_hash: bytes) -> Tombstone | None:
        """What is remembered of the block."""
        return self._ring.get((namespace, block_hash))
