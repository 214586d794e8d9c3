"""The directory's memory: blocks and placements as rows of typed columns.

One Python object a block would cost twice the bytes and make every garbage collection walk a million objects; columns
keep a block with one placement under 320 bytes, its hash and index entry included (`kvpool bench lookup` measures it).
"""

from array import array
from enum import IntEnum

NIL = -1
"""No row: an unknown parent, the end of a list."""

ROOT = -2
"""The parent of a chain's first block."""

NEVER_US = -1
NO_SLOT = 0xFFFF_FFFF


class BlockState(IntEnum):
    """States of a block entry (architecture, section 5)."""

    FREE = 0
    IN_FLIGHT = 1
    """Reserved: some shard's bytes are not committed."""
    DORMANT = 2
    """Committed, but its parent is not visible, or a lost shard has not come back: kept, never matched."""
    VISIBLE = 3
    """All shards committed, and the parent is visible."""


class BlockTable:
    """Rows of block entries. Links (`parent`, children, siblings, `placement`) are row numbers or NIL.

    `home_segment` is the segment of the first placement: where the block waits to be evicted. `held_until_us` covers
    leases; pins are few and kept apart, so that unpinning one leaves the leases as they were.
    """

    def __init__(self) -> None:
        self.hash: list[bytes] = []
        self.namespace = array("H")
        self.state = array("B")
        self.missing_shards = array("H")
        self.home_segment = array("H")
        self.parent = array("i")
        self.first_child = array("i")
        self.next_sibling = array("i")
        self.previous_sibling = array("i")
        self.placement = array("i")
        self.last_use_us = array("q")
        self.held_until_us = array("q")
        self.queued_at_us = array("q")
        self.pinned_until_us: dict[int, int] = {}
        self.live = 0
        self._free = NIL

    def __len__(self) -> int:
        return len(self.hash)

    def add(self, block_hash: bytes, namespace: int, shards: int, now_us: int) -> int:
        """A new in-flight row without parent, children or placements."""
        self.live += 1
        row = self._free
        if row == NIL:
            return self._append(block_hash, namespace, shards, now_us)
        self._free = self.parent[row]
        self.hash[row] = block_hash
        self.namespace[row] = namespace
        self.state[row] = BlockState.IN_FLIGHT
        self.missing_shards[row] = shards
        self.parent[row] = NIL
        self.last_use_us[row] = now_us
        self.held_until_us[row] = NEVER_US
        return row

    def hold_us(self, row: int) -> int:
        """Until when ``row`` may not be evicted."""
        pinned_us = self.pinned_until_us.get(row, NEVER_US) if self.pinned_until_us else NEVER_US
        return max(self.held_until_us[row], pinned_us)

    def free(self, row: int) -> None:
        """Give the row back; its links must already be gone."""
        self.pinned_until_us.pop(row, None)
        self.live -= 1
        self.hash[row] = b""
        self.state[row] = BlockState.FREE
        self.queued_at_us[row] = NEVER_US
        self.parent[row] = self._free
        self._free = row

    def _append(self, block_hash: bytes, namespace: int, shards: int, now_us: int) -> int:
        self.hash.append(block_hash)
        self.namespace.append(namespace)
        self.state.append(BlockState.IN_FLIGHT)
        self.missing_shards.append(shards)
        self.home_segment.append(0)
        for links in (
            self.parent,
            self.first_child,
            self.next_sibling,
            self.previous_sibling,
            self.placement,
        ):
            links.append(NIL)
        self.last_use_us.append(now_us)
        self.held_until_us.append(NEVER_US)
        self.queued_at_us.append(NEVER_US)
        return len(self.hash) - 1


class PlacementTable:
    """Rows of placements: one copy of one shard of a block on one segment; `slot` is NO_SLOT until committed.

    `next` links the placements of one block; `segment_next` and `segment_previous` those of one segment, so that
    losing a segment touches only its own rows.
    """

    def __init__(self) -> None:
        self.block = array("i")
        self.shard = array("H")
        self.segment = array("H")
        self.slot = array("I")
        self.generation = array("Q")
        self.checksum = array("Q")
        self.next = array("i")
        self.segment_next = array("i")
        self.segment_previous = array("i")
        self._free = NIL

    def add(self, block: int, shard: int, segment: int) -> int:
        """A new reserved placement, linked to nothing."""
        row = self._free
        if row == NIL:
            return self._append(block, shard, segment)
        self._free = self.next[row]
        self.block[row] = block
        self.shard[row] = shard
        self.segment[row] = segment
        self.slot[row] = NO_SLOT
        self.next[row] = NIL
        return row

    def free(self, row: int) -> None:
        """Give the row back; it must be unlinked from its block and its segment."""
        self.block[row] = NIL
        self.next[row] = self._free
        self._free = row

    def _append(self, block: int, shard: int, segment: int) -> int:
        self.block.append(block)
        self.shard.append(shard)
        self.segment.append(segment)
        self.slot.append(NO_SLOT)
        self.generation.append(0)
        self.checksum.append(0)
        for links in (self.next, self.segment_next, self.segment_previous):
            links.append(NIL)
        return len(self.block) - 1
