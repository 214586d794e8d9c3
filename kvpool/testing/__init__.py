"""Public fakes for tests of kvpool and of what is built on it."""

from kvpool.testing.clock import ManualClock

__all__ = ["ManualClock"]
