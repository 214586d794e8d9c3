"""Pauses before another try, drawn at random: those who failed together must not come back together."""

import random


def full_jitter(most_s: float) -> float:
    """A pause of up to ``most_s``."""
    return random.random() * most_s  # noqa: S311 - spreads load, keeps no secret


def equal_jitter(most_s: float) -> float:
    """A pause from half of ``most_s`` up to it, where none at all would be of no use."""
    return most_s - full_jitter(most_s / 2)


class Backoff:
    """Pauses with full jitter under a limit that doubles with every try. Not thread-safe.

    Args:
        first_s: Limit of the first pause.
        most_s: Limit of all.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = self._limit_s = first_s
        self._most_s = most_s

    def next_s(self) -> float:
        """The next pause."""
        pause_s = full_jitter(self._limit_s)
        self._limit_s = min(2 * self._limit_s, self._most_s)
        return pause_s

    def reset(self) -> None:
        """A try succeeded: begin anew."""
        self._limit_s = self._first_s
