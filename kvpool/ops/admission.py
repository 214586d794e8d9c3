"""Admission: so many at a time, and whoever comes beyond that is told at once to come later."""

import threading
from contextlib import AbstractContextManager, nullcontext

from kvpool.core.errors import OverloadedError


class Admission:
    """A context manager that up to ``most`` threads are in; raises OverloadedError for further ones.

    Args:
        what: What they are, for the refusal.
        most: How many may be in at a time.
        inner: Entered after admission, e.g. the lock that those admitted wait for: a queue with an end.

    Attributes:
        refused: How many were not let in.
    """

    def __init__(self, what: str, most: int, inner: AbstractContextManager[object] | None = None) -> None:
        self._what = what
        self._most = most
        self._inner = inner or nullcontext()
        self._inside = 0
        self._lock = threading.Lock()
        self.refused = 0

    @property
    def inside(self) -> int:
        """How many are in now."""
        return self._inside

    def __enter__(self) -> None:
        with self._lock:
            if self._inside >= self._most:
                self.refused += 1
                raise OverloadedError(f"{self._inside} {self._what} at a time is the limit here; try again later")
            self._inside += 1
        self._inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(None, None, None)
        with self._lock:
            self._inside -= 1
