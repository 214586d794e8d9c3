"""Sizes and durations as people write them: ``64GiB``, ``200ms``, ``5m``. Ambiguous ones are refused."""

import re

from kvpool.core.errors import UsageError
from kvpool.core.limits import PAGE_BYTES

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_SIZES |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION_S_MAX = 1e9
_NUMBER = re.compile(r"^\s*(\d{1,20}(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


def pages_of(size_bytes: int) -> int:
    """Pages that ``size_bytes`` take, the last one perhaps in part."""
    return -(-size_bytes // PAGE_BYTES)


def parse_size(text: str | int) -> int:
    """Bytes in ``text``: an integer, or a number with B, KiB, MiB, GiB, TiB, PiB (or kB, MB, GB, TB).

    Raises:
        UsageError: Anything else, ``64G`` included, since G may mean either.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    number, unit = _split(str(text), "size", "64GiB")
    if unit not in _SIZES and unit != "":
        raise UsageError(f"size {text!r}: unit {unit!r} is not known or ambiguous; use one of {', '.join(_SIZES)}")
    if unit == "" and "." in number:
        raise UsageError(f"size {text!r} has a fraction of a byte; add a unit, e.g. {number}GiB")
    return round(float(number) * _SIZES[unit]) if unit else int(number)


def parse_duration(text: str | float) -> float:
    """Seconds in ``text``: a number of seconds, or a number with us, ms, s, m, h, d.

    Raises:
        UsageError: Anything else, or more than `DURATION_S_MAX`.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds: float = text
    else:
        number, unit = _split(str(text), "duration", "200ms")
        if unit not in _DURATIONS and unit != "":
            raise UsageError(f"duration {text!r}: unit {unit!r} is not known; use one of {', '.join(_DURATIONS)}")
        seconds = float(number) * _DURATIONS.get(unit, 1.0)
    if not abs(seconds) <= DURATION_S_MAX:
        raise UsageError(f"duration {text!r} is more than {DURATION_S_MAX:g} s, or no number; give a shorter one")
    return float(seconds)


def format_size(size_bytes: int) -> str:
    """The size with the largest binary unit that keeps it at 1 or more: ``1.5 GiB``."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _SIZES[unit]:
            return f"{size_bytes / _SIZES[unit]:.4g} {unit}"
    return f"{size_bytes} B"


def _split(text: str, what: str, example: str) -> tuple[str, str]:
    match = _NUMBER.match(text)
    if match is None:
        raise UsageError(f"{what} {text!r} is not a number with a unit; write e.g. {example}")
    return match.group(1), match.group(2)
