"""Copies on their way: blocks that a node was told to fetch from another, until it has committed them.

A copy is no placement before it is committed: only its bytes are promised, so nothing that reads placements can come
upon it. It is made from one segment to another, of one shard of some blocks, and belongs to no reservation: the blocks
stay as they are, visible or not, whatever becomes of it.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvpool.core.directory.segments import Segment


@dataclass(slots=True)
class Copy:
    """Blocks to fetch.

    Attributes:
        number: The write token; from the same sequence as the reservations'.
        namespace: Number of their namespace.
        shard: Which shard of them.
        source: Where they lie.
        destination: Where they are to lie.
        slot_bytes: Bytes promised there for each.
        deadline_us: When the blocks that were not committed are given up.
        hashes: Theirs, in order.
        parents: Their parents' hashes; empty for a root.
        slots: Of each, at the source (``array("I")``).
        generations: ``array("Q")``.
        checksums: ``array("Q")``.
        rows: The blocks' rows that are not committed yet, by hash.
    """

    number: int
    namespace: int
    shard: int
    source: Segment
    destination: Segment
    slot_bytes: int
    deadline_us: int
    hashes: list[bytes] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    slots: "array[int]" = field(default_factory=lambda: array("I"))
    generations: "array[int]" = field(default_factory=lambda: array("Q"))
    checksums: "array[int]" = field(default_factory=lambda: array("Q"))
    rows: dict[bytes, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes still promised."""
        return len(self.rows) * self.slot_bytes


class Copies:
    """The open copies by number, and by the row of each block."""

    def __init__(self) -> None:
        self._open: dict[int, Copy] = {}
        self._by_row: dict[int, list[Copy]] = {}
        self._deadlines: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Copy]:
        return iter(list(self._open.values()))

    def open(self, copy: Copy) -> None:
        """Keep a new copy with all its rows."""
        self._open[copy.number] = copy
        heappush(self._deadlines, (copy.deadline_us, copy.number))
        for row in copy.rows.values():
            self._by_row.setdefault(row, []).append(copy)

    def get(self, number: int) -> Copy | None:
        """The open copy ``number``."""
        return self._open.get(number)

    def of_row(self, row: int) -> Sequence[Copy]:
        """The open copies of a block, as they are now."""
        return tuple(self._by_row.get(row, ())) if self._by_row else ()

    def count_to(self, segment: Segment) -> int:
        """Open copies to a segment."""
        return sum(copy.destination is segment for copy in self._open.values())

    def bytes_to(self, segment: Segment) -> int:
        """Bytes promised to them."""
        return sum(copy.size_bytes for copy in self._open.values() if copy.destination is segment)

    def settle(self, copy: Copy, block_hash: bytes) -> None:
        """The block was copied, or will not be; a copy without any left is closed."""
        row = copy.rows.pop(block_hash)
        others = self._by_row[row]
        others.remove(copy)
        if not others:
            del self._by_row[row]
        if not copy.rows:
            del self._open[copy.number]

    def due(self, now_us: int) -> Iterator[Copy]:
        """Open copies whose deadline has passed; the caller gives their rows up before the next one."""
        while self._deadlines and self._deadlines[0][0] <= now_us:
            copy = self._open.get(heappop(self._deadlines)[1])
            if copy is not None:
                yield copy
