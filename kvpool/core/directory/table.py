"""The directory's memory: blocks and placements as rows of typed columns.

One Python object a block would cost twice the bytes and make every garbage collection walk a million objects; columns
keep a block with one placement under 320 bytes, its hash and index entry included (`kvpool bench lookup` measures it).
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

NIL = -1
"""No row: an unknown parent, the end of a list."""

ROOT = -2
"""The parent of a chain's first block."""

NEVER_US = -1
NO_SLOT = 0xFFFF_FFFF


class BlockState(IntEnum):
    """States of a block entry (docs/design/directory.md)."""

    FREE = 0
    IN_FLIGHT = 1
    """Reserved: some shard's bytes are not committed."""
    DORMANT = 2
    """Committed, but its parent is not visible, or a lost shard has not come back: kept, never matched."""
    VISIBLE = 3
    """All shards committed, and the parent is visible."""


class Reuse(IntEnum):
    """Whether a block has been read since it was written, and what waits for it since."""

    NONE = 0
    READ = 1
    """It waits to be copied to disk, or is there."""
    WANTED = 2
    """Read from disk: it waits to be copied to memory."""


Rows = Sequence[int]
"""Row numbers; a ``range`` where they follow one another, which lets columns be written as slices."""


def view(column: "array[Any]") -> NDArray[Any]:
    """The column as a numpy array, to read or write many rows at once.

    While it lives the column cannot grow: use it in one expression and let it go.
    """
    return np.frombuffer(column, column.typecode)


class BlockTable:
    """Rows of block entries. Links (`parent`, children, siblings, `placement`) are row numbers or NIL.

    `home_segment` is that of the last placement, a primary one: where the block waits to be evicted. `use` is what the
    eviction policy knows of the block's past (`kvpool.core.eviction.use`). `held_until_us` covers leases; pins are few
    and kept apart, so that unpinning one leaves the leases as they were. `owners` are tenants by namespace.
    """

    def __init__(self) -> None:
        self.hash: list[bytes] = []
        self.namespace = array("H")
        self.state = array("B")
        self.reused = array("B")
        self.missing_shards = array("H")
        self.use = array("H")
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
        self.owners: list[int] = []
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
        self.reused[row] = Reuse.NONE
        self.missing_shards[row] = shards
        self.parent[row] = NIL
        self.use[row] = 0
        self.last_use_us[row] = now_us
        self.held_until_us[row] = NEVER_US
        return row

    def owner(self, row: int) -> int:
        """Number of the tenant that ``row`` belongs to."""
        return self.owners[self.namespace[row]]

    def hold_us(self, row: int) -> int:
        """Until when ``row`` may not be evicted."""
        pinned_us = self.pinned_until_us.get(row, NEVER_US) if self.pinned_until_us else NEVER_US
        return max(self.held_until_us[row], pinned_us)

    def add_run(self, hashes: list[bytes], namespace: int, shards: int, now_us: int) -> Rows:
        """Rows as `add` gives them, one for each hash."""
        if self._free != NIL:
            return [self.add(block_hash, namespace, shards, now_us) for block_hash in hashes]
        start, count = len(self.hash), len(hashes)
        self.live += count
        self.hash += hashes
        self._extend(count, namespace, shards, now_us)
        return range(start, start + count)

    def set_use(self, rows: Rows, use: int) -> None:
        """Set `use` of many rows."""
        if isinstance(rows, range):
            self.use[rows.start : rows.stop] = array("H", [use]) * len(rows)
            return
        for row in rows:
            self.use[row] = use

    def free(self, row: int) -> None:
        """Give the row back; its links must already be gone."""
        self.live -= 1
        self.hash[row] = b""
        self.state[row] = BlockState.FREE
        self.queued_at_us[row] = NEVER_US
        self.parent[row] = self._free
        self._free = row

    def _append(self, block_hash: bytes, namespace: int, shards: int, now_us: int) -> int:
        self.hash.append(block_hash)
        self._extend(1, namespace, shards, now_us)
        return len(self.hash) - 1

    def _extend(self, count: int, namespace: int, shards: int, now_us: int) -> None:
        self.namespace.extend(array("H", [namespace]) * count)
        self.state.extend(array("B", [BlockState.IN_FLIGHT]) * count)
        self.reused.extend(array("B", [Reuse.NONE]) * count)
        self.missing_shards.extend(array("H", [shards]) * count)
        self.use.extend(array("H", [0]) * count)
        self.home_segment.extend(array("H", [0]) * count)
        unlinked = array("i", [NIL]) * count
        for links in (self.parent, self.first_child, self.next_sibling, self.previous_sibling, self.placement):
            links.extend(unlinked)
        self.last_use_us.extend(array("q", [now_us]) * count)
        never = array("q", [NEVER_US]) * count
        self.held_until_us.extend(never)
        self.queued_at_us.extend(never)


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

    def add_run(self, blocks: Rows, shard: int, segment: int) -> Rows:
        """Rows as `add` gives them, one for each block."""
        if self._free != NIL:
            return [self.add(block, shard, segment) for block in blocks]
        start = len(self.block)
        self._extend(array("i", blocks), shard, segment)
        return range(start, len(self.block))

    def free(self, row: int) -> None:
        """Give the row back; it must be unlinked from its block and its segment."""
        self.block[row] = NIL
        self.next[row] = self._free
        self._free = row

    def _append(self, block: int, shard: int, segment: int) -> int:
        self._extend(array("i", [block]), shard, segment)
        return len(self.block) - 1

    def _extend(self, blocks: "array[int]", shard: int, segment: int) -> None:
        count = len(blocks)
        self.block.extend(blocks)
        self.shard.extend(array("H", [shard]) * count)
        self.segment.extend(array("H", [segment]) * count)
        self.slot.extend(array("I", [NO_SLOT]) * count)
        zeros = array("Q", [0]) * count
        self.generation.extend(zeros)
        self.checksum.extend(zeros)
        unlinked = array("i", [NIL]) * count
        for links in (self.next, self.segment_next, self.segment_previous):
            links.extend(unlinked)
