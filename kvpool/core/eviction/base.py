"""What an eviction policy decides: which leaf of a segment goes first."""

from typing import NamedTuple, Protocol

DORMANT, VISIBLE = 0, 1
"""Ranks: what nobody can match goes first."""


class Candidate(NamedTuple):
    """The block a segment would give up first. Candidates of different segments compare: the smaller goes first."""

    rank: int
    """DORMANT or VISIBLE."""
    last_use_us: int
    row: int


class EvictionPolicy(Protocol):
    """Order of eviction among the leaves of each segment.

    A *leaf* has no child, in flight or not. Only leaves that are committed and not held (leased or pinned) may be
    offered as victims: evicting anything else would leave a prefix with a hole or pull bytes from under a reader.
    The directory calls `changed` whenever a leaf may have become evictable or changed its rank; it need not call it
    when a block was merely used, held, or grew a child: policies look again before they answer.
    """

    def changed(self, row: int) -> None:
        """Leaf ``row`` may now be evictable on its home segment, or its hold was shortened (unpinned)."""

    def lost(self, segment: int) -> None:
        """The segment is gone, and its blocks with it."""

    def first(self, segment: int, now_us: int) -> Candidate | None:
        """The leaf of ``segment`` to evict first, or None when all are held; the caller may evict it or not."""
