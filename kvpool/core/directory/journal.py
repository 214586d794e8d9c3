"""What became visible and what ceased to be, in order: written down as it happens, for whoever publishes it.

Without a journal the directory does none of this. With one, a block that becomes visible is its row in a list; hashes
are looked up many at a time, when somebody takes them or when a block is about to go. Everything else is for the
reader, on a thread of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.core.directory.table import ROOT, BlockTable

PILE_MAX = 1 << 20
"""Changes kept for a reader that does not come: a prompt that all share may take so many with it at once."""

ROWS_MAX = 4096
"""Rows whose hashes are looked up at a time."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Blocks that became visible or ceased to be, in order: columns, equally long.

    Attributes:
        namespaces: Numbers of their namespaces.
        hashes: Theirs.
        parents: Their parents' hashes, empty for a root; None for a block that went.
    """

    namespaces: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.hashes)

    def add_stored(self, blocks: BlockTable, rows: Sequence[int]) -> None:
        """These became visible, parents before their children."""
        hashes, parent, namespace = blocks.hash, blocks.parent, blocks.namespace
        self.namespaces.extend([namespace[row] for row in rows])
        self.hashes.extend([hashes[row] for row in rows])
        self.parents.extend([b"" if parent[row] == ROOT else hashes[parent[row]] for row in rows])

    def add_removed(self, blocks: BlockTable, rows: Sequence[int]) -> None:
        """These went."""
        self.namespaces.extend([blocks.namespace[row] for row in rows])
        self.hashes.extend([blocks.hash[row] for row in rows])
        self.parents.extend([None] * len(rows))


@dataclass(frozen=True, slots=True)
class Pile:
    """Changes since the last look, and how many there were before these that nobody can tell any more."""

    changes: Changes = field(default_factory=Changes)
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
        self._most = most
        self._rows: list[int] = []
        """Became visible after all of the changes, and still are."""
        self._changes = Changes()
        self._lost = 0
        self._is_idle = True

    def stored(self, row: int) -> None:
        """This one became visible, after its parent."""
        if self._is_idle:
            self._begin()
        rows = self._rows
        rows.append(row)
        if len(rows) >= ROWS_MAX:
            self._look_up()

    def stored_all(self, rows: Sequence[int]) -> None:
        """These became visible, parents before their children."""
        if self._is_idle:
            self._begin()
        self._rows.extend(rows)
        self._look_up()

    def removed(self, rows: Sequence[int]) -> None:
        """These, if there are any, cease to be visible; called before they go."""
        if not rows:
            return
        if self._is_idle:
            self._begin()
        self._look_up()
        self._changes.add_removed(self._blocks, rows)

    def take(self) -> Pile:
        """What is there, which is not there afterwards."""
        self._look_up()
        taken = Pile(self._changes, self._lost)
        self._changes, self._lost, self._is_idle = Changes(), 0, True
        return taken

    def _begin(self) -> None:
        self._is_idle = False
        self._on_first()

    def _look_up(self) -> None:
        if len(self._changes) >= self._most:
            self._lost += len(self._changes)
            self._changes = Changes()
        self._changes.add_stored(self._blocks, self._rows)
        self._rows.clear()
