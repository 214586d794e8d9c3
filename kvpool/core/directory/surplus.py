"""Lists of surplus copies: one for each tenant on each segment, linked through the placements' own columns."""

from dataclasses import dataclass

from kvpool.core.directory.table import NIL, PlacementTable


@dataclass(slots=True)
class SurplusList:
    """Surplus copies, the newest first.

    Attributes:
        first: Its first row, or NIL.
        last: Its last row: the copy to give up first.
    """

    first: int = NIL
    last: int = NIL

    def push(self, rows: PlacementTable, placement: int) -> None:
        """Put a placement that is on no list in front."""
        if self.first == NIL:
            self.last = placement
        link(rows, placement, self.first)
        self.first = placement

    def pull(self, rows: PlacementTable, placement: int) -> None:
        """Take a placement of this list off it."""
        if self.first == placement:
            self.first = rows.segment_next[placement]
        if self.last == placement:
            self.last = rows.segment_previous[placement]
        unlink(rows, placement)


def link(rows: PlacementTable, placement: int, following: int) -> None:
    """Put a placement before the first one of a segment's list."""
    rows.segment_next[placement] = following
    rows.segment_previous[placement] = NIL
    if following != NIL:
        rows.segment_previous[following] = placement


def unlink(rows: PlacementTable, placement: int) -> None:
    """Let the neighbours of a placement on a segment's list be each other's; who keeps its ends sees to them."""
    before, after = rows.segment_previous[placement], rows.segment_next[placement]
    if before != NIL:
        rows.segment_next[before] = after
    if after != NIL:
        rows.segment_previous[after] = before
