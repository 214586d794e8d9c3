"""Write reservations: who may commit which in-flight blocks, and until when."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvpool.core.directory.table import Rows


@dataclass(slots=True)
class Reservation:
    """One writer's blocks in flight.

    Attributes:
        number: The write token: every commit and abort names it, so that an older write cannot complete a newer one.
        namespace: Number of the namespace its blocks are in.
        owner: Whose it is, for the log.
        deadline_us: When the blocks still in flight are freed for others.
        rows: The rows still in flight.
    """

    number: int
    namespace: int
    owner: str
    deadline_us: int
    rows: set[int] = field(default_factory=set)


class Reservations:
    """The open reservations. An in-flight row belongs to exactly one; numbers follow ``last_number``."""

    def __init__(self, last_number: int = 0) -> None:
        self._open: dict[int, Reservation] = {}
        self._by_row: dict[int, Reservation] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._last_number = last_number

    def __len__(self) -> int:
        return len(self._open)

    def next_number(self) -> int:
        """A write token never given before."""
        self._last_number += 1
        return self._last_number

    def open(self, namespace: int, owner: str, deadline_us: int) -> Reservation:
        """A new, empty reservation with a number never used before."""
        reservation = Reservation(self.next_number(), namespace, owner, deadline_us)
        self._open[reservation.number] = reservation
        heappush(self._deadlines, (deadline_us, reservation.number))
        return reservation

    def claim(self, reservation: Reservation, row: int) -> None:
        """``row`` is in flight for ``reservation``."""
        reservation.rows.add(row)
        self._by_row[row] = reservation

    def claim_run(self, reservation: Reservation, rows: Rows) -> None:
        """`claim` for several rows."""
        reservation.rows.update(rows)
        self._by_row.update(dict.fromkeys(rows, reservation))

    def release(self, row: int) -> None:
        """``row`` is committed or gone; a reservation without rows is closed."""
        reservation = self._by_row.pop(row, None)
        if reservation is not None:
            reservation.rows.discard(row)
            if not reservation.rows:
                self._open.pop(reservation.number, None)

    def close(self, reservation: Reservation) -> None:
        """Forget a reservation that never got a row."""
        assert not reservation.rows
        self._open.pop(reservation.number, None)

    def get(self, number: int) -> Reservation | None:
        """The open reservation ``number``."""
        return self._open.get(number)

    def of_row(self, row: int) -> Reservation | None:
        """The reservation that ``row`` is in flight for."""
        return self._by_row.get(row)

    def due(self, now_us: int) -> Iterator[Reservation]:
        """Open reservations whose deadline has passed; the caller removes their rows before the next one."""
        while self._deadlines and self._deadlines[0][0] <= now_us:
            _, number = heappop(self._deadlines)
            reservation = self._open.get(number)
            if reservation is not None:
                yield reservation
