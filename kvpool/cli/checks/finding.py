"""What a check finds."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, but worse than it could, or soon will not."""
    FAIL = "fail"
    """What was asked for does not work like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was seen, and what to do about it; ``fix`` is empty when nothing needs doing."""

    check: str
    verdict: Verdict
    seen: str
    fix: str = ""


def ok(check: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Verdict.OK, seen)


def warn(check: str, seen: str, fix: str) -> Finding:
    """See `Verdict.WARN`."""
    return Finding(check, Verdict.WARN, seen, fix)


def fail(check: str, seen: str, fix: str) -> Finding:
    """See `Verdict.FAIL`."""
    return Finding(check, Verdict.FAIL, seen, fix)
