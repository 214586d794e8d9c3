"""Things opened when first needed: one caller opens, the others wait for it, each no longer than its own deadline."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvpool.core.errors import ClosedError, DeadlineError
from kvpool.transport.deadline import Deadline

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class OpenOnce(Generic[Key, Value]):
    """Values by key. Thread-safe; owns what it opened until `drop` or `close`.

    Args:
        what: What the values are, for errors.
        close_value: Ends one; also what was still being opened when `close` was called.
    """

    def __init__(self, what: str, close_value: Callable[[Value], None]) -> None:
        self._what = what
        self._close_value = close_value
        self._lock = threading.Lock()
        self._values: dict[Key, Value] = {}
        self._gates: dict[Key, threading.Lock] = {}
        self._closed = False

    def get(self, key: Key, open_value: Callable[[], Value], deadline: Deadline) -> Value:
        """The value of ``key``, opened by ``open_value`` if there is none.

        Raises:
            DeadlineError: Another caller was still opening it.
            ClosedError: After `close`.
        """
        value = self._values.get(key)
        if value is not None:
            return value
        with self._lock:
            self._check_open()
            gate = self._gates.setdefault(key, threading.Lock())
        if not gate.acquire(timeout=deadline.left_s()):
            raise DeadlineError(f"another call is still opening {self._what}")
        try:
            value = self._values.get(key)
            return value if value is not None else self._keep(key, open_value())
        finally:
            gate.release()

    def drop(self, key: Key, only: Value | None = None) -> None:
        """Close the value of ``key``, if there is one; the next `get` opens another.

        With ``only``, if it is still that one: of many who saw it fail, none closes what another has opened since.
        """
        with self._lock:
            value = self._values.get(key)
            if value is None or (only is not None and value is not only):
                return
            del self._values[key]
        self._close_value(value)

    def items(self) -> list[tuple[Key, Value]]:
        """What is open now."""
        with self._lock:
            return list(self._values.items())

    def drop_all(self) -> None:
        """Close everything that is open now."""
        with self._lock:
            values, self._values = list(self._values.values()), {}
        for value in values:
            self._close_value(value)

    def close(self) -> None:
        """Close everything, for good."""
        with self._lock:
            self._closed = True
        self.drop_all()

    def _keep(self, key: Key, value: Value) -> Value:
        with self._lock:
            if not self._closed:
                self._values[key] = value
                return value
        self._close_value(value)
        raise ClosedError(f"{self._what} was closed")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._what} was closed")
