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
    NOT_WORTH_LOADING = "not_worth_loading"
    RECOVERING = "recovering"
    QUOTA = "quota"
    PARENT_MISSING = "parent_missing"
    """The block is stored, but an ancestor is not: it cannot be matched until that comes back."""
    IN_FLIGHT = "in_flight"
    """The block is being written."""


class Tombstone(NamedTuple):
    """One block that left: why, and when on the directory's clock."""

    reason: MissReason
    at_us: int


class Tombstones:
    """The last ``size`` blocks that left; the oldest are forgotten first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ring: OrderedDict[tuple[int, bytes], Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ring)

    def bury(self, namespace: int, block_hash: bytes, reason: MissReason, now_us: int) -> None:
        """Remember that the block left."""
        key = (namespace, block_hash)
        self._ring.pop(key, None)
        self._ring[key] = Tombstone(reason, now_us)
        if len(self._ring) > self._size:
            self._ring.popitem(last=False)

    def find(self, namespace: int, block_hash: bytes) -> Tombstone | None:
        """What is remembered of the block."""
        return self._ring.get((namespace, block_hash))
