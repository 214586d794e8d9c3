"""Following what can be matched: the changes as they come, and all of it in parts for whoever has missed some."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvpool.core.directory.chains import Chains
from kvpool.core.directory.journal import Changes, Journal, Pile
from kvpool.core.directory.table import BlockState, view


@dataclass(frozen=True, slots=True)
class Part:
    """Part of what can be matched.

    Attributes:
        changes: As if each block had just become visible.
        following: Where the next part begins; None after the last one.
    """

    changes: Changes
    following: int | None


class Following:
    """What becomes visible and what ceases to be. Off until somebody begins, and free until then."""

    def __init__(self, chains: Chains) -> None:
        self._chains = chains

    def begin(self, on_first: Callable[[], None]) -> None:
        """Keep changes from now on, the first one after each `take` calls ``on_first``, which must not call back."""
        self._chains.journal = Journal(self._chains.blocks, on_first)

    def end(self) -> None:
        """Keep no more changes."""
        self._chains.journal = None

    def take(self) -> Pile:
        """What has changed since the last call."""
        journal = self._chains.journal
        return Pile() if journal is None else journal.take()

    def visible(self, first: int, most: int) -> Part:
        """The visible blocks among ``most`` rows from ``first`` on.

        A block keeps its row for as long as it is visible. So parts taken one after the other, with all changes since
        before the first one applied on top, are what is visible at the end.
        """
        blocks = self._chains.blocks
        end = min(first + most, len(blocks))
        found = Changes()
        if first < end:
            rows = np.flatnonzero(view(blocks.state)[first:end] == BlockState.VISIBLE) + first
            found.add_stored(blocks, rows.tolist())
        return Part(found, end if end < len(blocks) else None)
