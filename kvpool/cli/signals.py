"""Signals that end a command: the first one unwinds the stack, and nothing interrupts the cleaning up."""

import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

SESSION_ENDINGS = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
"""What ends a command that is run by hand; it stops the processes that it started on its way out."""


def unwind_once(numbers: Iterable[signal.Signals]) -> None:
    """Let the first of these signals raise, KeyboardInterrupt or SystemExit; those after it do nothing.

    Wrappers such as `timeout` and terminals send a signal twice; raised in the middle of cleaning up, the second one
    would leave threads and processes running.
    """
    ending = tuple(numbers)

    def unwind(number: int, _frame: FrameType | None) -> None:
        ignore(ending)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for each in ending:
        signal.signal(each, unwind)


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """Let these signals do nothing; unlike SIG_IGN, not in processes that are started from here."""
    for each in numbers:
        signal.signal(each, lambda _number, _frame: None)


@contextmanager
def wakeups() -> Iterator[socket.socket]:
    """A socket from which the numbers of handled signals can be read, a byte each.

    The system may give a signal to any thread, which wakes no main thread that waits for a lock or a queue; one that
    reads is woken whichever thread it was.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.settimeout(0)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(before)
