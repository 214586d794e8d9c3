"""What an eviction policy decides: which leaf of a segment goes first, and whether a new block is worth its room."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

DORMANT, VISIBLE = 0, 1
"""Ranks: what nobody can match goes first."""


class Candidate(NamedTuple):
    """The block a segment would give up first. Candidates of different segments compare: the smaller goes first."""

    rank: int
    """DORMANT or VISIBLE."""
    worth: float
    """What keeping the block is worth by the policy's measure; 0 where age alone decides."""
    last_use_us: int
    row: int


class EvictionPolicy(Protocol):
    """Order of eviction among the leaves that each tenant has on each segment.

    A *leaf* has no child, in flight or not. Only leaves that are committed and not held (leased or pinned) may be
    offered as victims: evicting anything else would leave a prefix with a hole or pull bytes from under a reader.
    The directory calls `changed` whenever a leaf may have become evictable or changed its rank; it need not call it
    when a block was merely used, held, or grew a child: policies look again before they answer.
    """

    def changed(self, row: int) -> None:
        """Leaf ``row`` may now be evictable on its home segment, or its hold was shortened (unpinned)."""

    def matched(self, row: int, now_us: int) -> None:
        """``row`` is the deepest block of a match, and not held by an earlier one; its last use is still the old one.

        On the path of every look-up: O(1), and work is put off.
        """

    def begins(self, above: int, hashes: Sequence[bytes], now_us: int) -> int:
        """The blocks ``hashes`` are about to be written below row ``above`` (negative: none).

        Returns what `BlockTable.use` holds of them.
        """

    def lost(self, segment: int) -> None:
        """The segment is gone, and its blocks with it."""

    def first(self, segment: int, owner: int, now_us: int) -> Candidate | None:
        """The leaf of tenant ``owner`` on ``segment`` to evict first, or None when all are held.

        The caller may evict it or not.
        """

    def admits(self, use: int, victim: Candidate) -> bool:
        """Whether a new block with ``use`` may take the place of ``victim``, a visible one."""
