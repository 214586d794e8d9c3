"""What became visible and what ceased to be, in order: written down as it happens, for whoever publishes it.

Without a journal the directory does none of this. With one each change is three references in a flat list, whose
making needs no object that the garbage collector looks at; everything else is for the reader, on a thread of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.core.directory.table import ROOT, BlockTable

PILE_MAX = 1 << 20
"""Changes kept for a reader that does not come: a prompt that all share may take so many with it at once."""

Change = int | bytes | None

STRIDE = 3
"""A change is (namespace number, hash, parent's hash): an empty one for a root, None for a block that went."""


@dataclass(frozen=True, slots=True)
class Pile:
    """Changes since the last look.

    Attributes:
        changes: Flat, `STRIDE` each, in order.
        lost: How many there were before these that nobody can tell any more.
    """

    changes: list[Change]
    lost: int = 0


class Journal:
    """The changes that nobody has taken yet.

    Args:
        blocks: What changes.
        on_first: Called when there is something to take, once until it is taken; must be quick and not call back.
        most: Changes kept.
    """

    def __init__(self, blocks: BlockTable, on_first: Callable[[], None], most: int = PILE_MAX) -> None:
        self._blocks = blocks
        self._on_first = on_first
        self._entries_max = most * STRIDE
        self._pile: list[Change] = []
        self._lost = 0

    def stored(self, rows: list[int]) -> None:
        """These became visible, parents before their children."""
        blocks, pile = self._blocks, self._begin()
        for row in rows:
            parent = blocks.parent[row]
            pile += (blocks.namespace[row], blocks.hash[row], b"" if parent == ROOT else blocks.hash[parent])

    def removed(self, rows: list[int]) -> None:
        """These cease to be visible; called before they go."""
        blocks, pile = self._blocks, self._begin()
        for row in rows:
            pile += (blocks.namespace[row], blocks.hash[row], None)

    def take(self) -> Pile:
        """What is there, which is not there afterwards."""
        taken = Pile(self._pile, self._lost)
        self._pile, self._lost = [], 0
        return taken

    def __len__(self) -> int:
        return len(self._pile) // STRIDE

    def _begin(self) -> list[Change]:
        if not self._pile:
            self._on_first()
        elif len(self._pile) >= self._entries_max:
            self._lost += len(self)
            self._pile = []
        return self._pile
