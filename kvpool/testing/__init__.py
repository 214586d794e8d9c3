"""Public fakes for tests of kvpool and of what is built on it."""

from kvpool.testing.clock import ManualClock
from kvpool.testing.history import Call, Commit, Get, History, Put, find_attempt, make_payload
from kvpool.testing.proxy import FaultProxy, Faults

__all__ = [
    "Call",
    "Commit",
    "FaultProxy",
    "Faults",
    "Get",
    "History",
    "ManualClock",
    "Put",
    "find_attempt",
    "make_payload",
]
