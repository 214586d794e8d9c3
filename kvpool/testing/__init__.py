"""Public fakes for tests of kvpool and of what is built on it."""

from kvpool.testing.clock import ManualClock
from kvpool.testing.history import Call, Commit, Get, History, Put, find_attempt, make_payload

__all__ = ["Call", "Commit", "Get", "History", "ManualClock", "Put", "find_attempt", "make_payload"]
