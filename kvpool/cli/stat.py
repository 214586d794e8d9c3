"""`kvpool stat`: a line a second, for logs and pipes."""

import shutil
import sys
from typing import Annotated

import typer

from kvpool.cli import with_settings
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, emit
from kvpool.cli.watching import Frame, frames, parse_interval, sleep
from kvpool.core.members import MemberState
from kvpool.core.units import format_size
from kvpool.ops.settings import Settings

HEADER_EVERY = 20
"""Lines after which the names of the columns are said again, where no screen says otherwise."""

_COLUMNS = (
    ("nodes", 7),
    ("used", 10),
    ("%", 4),
    ("blocks", 10),
    ("hit%", 6),
    ("lookup/s", 9),
    ("miss/s", 8),
    ("read/s", 10),
    ("stored/s", 10),
    ("evict/s", 8),
    ("leases", 7),
    ("refuse/s", 9),
)

Interval = Annotated[str, typer.Option("--interval", "-i", help="Time from one line to the next.")]
Count = Annotated[int | None, typer.Option("--count", "-n", min=1, help="Lines to print; by default until Ctrl-C.")]


@with_settings("client.pool", "client.timeout_s", *CLIENT_TLS_KEYS)
def stat(settings: Settings, output: Format, interval: Interval = "1s", count: Count = None) -> None:
    """Print a line a second: fill, hit rate, look-ups, bytes, evictions. The first line is since the service's start.

    Rates are of what the metadata service sees: read/s are bytes that readers were told where to find, stored/s those
    that writers committed. Exit with 3 when the pool cannot be reached (any more).
    """
    interval_s = parse_interval(interval)
    with connect_operator(settings) as pool:
        for i, frame in enumerate(frames(pool, interval_s, count, sleep)):
            if output is Format.TEXT and i % _header_every() == 0:
                emit(None, output, _line([name for name, _ in _COLUMNS]))
            emit(record(frame), output, _line(_cells(frame)))


def record(frame: Frame) -> dict[str, object]:
    """A frame for programs: gauges now, and rates since the frame before."""
    counters, rates = frame.status.counters, frame.rates
    gauges = ("capacity_bytes", "used_bytes", "disk_capacity_bytes", "disk_used_bytes", "blocks", "leases")
    return {
        "uptime_s": frame.status.uptime_s,
        "interval_s": rates.interval_s,
        "nodes": len(frame.status.nodes),
        "nodes_ready": _ready(frame),
        "namespaces": len(frame.status.namespaces),
        **{name: counters.get(name, 0) for name in gauges},
        "hit_rate": rates.hit_rate,
        "lookups_per_s": rates.lookups_per_s,
        "read_bytes_per_s": rates.read_bytes_per_s,
        "stored_bytes_per_s": rates.stored_bytes_per_s,
        "evicted_blocks_per_s": rates.evicted_blocks_per_s,
        "refused_per_s": rates.refused_per_s,
        "misses_per_s": rates.misses_per_s,
        "moved_bytes_per_s": rates.moved_bytes_per_s,
        "copied_bytes_per_s": rates.copied_bytes_per_s,
    }


def _cells(frame: Frame) -> list[str]:
    counters, rates = frame.status.counters, frame.rates
    used, capacity = counters.get("used_bytes", 0), counters.get("capacity_bytes", 0)
    return [
        f"{_ready(frame)}/{len(frame.status.nodes)}",
        format_size(used),
        f"{100 * used / max(1, capacity):.0f}",
        f"{counters.get('blocks', 0):,}",
        "-" if rates.hit_rate is None else f"{100 * rates.hit_rate:.1f}",
        f"{rates.lookups_per_s:,.0f}",
        f"{sum(rates.misses_per_s.values()):,.0f}",
        format_size(round(rates.read_bytes_per_s)),
        format_size(round(rates.stored_bytes_per_s)),
        f"{rates.evicted_blocks_per_s:,.0f}",
        f"{counters.get('leases', 0):,}",
        f"{rates.refused_per_s:,.0f}",
    ]


def _ready(frame: Frame) -> int:
    return sum(node.state == MemberState.READY for node in frame.status.nodes)


def _line(cells: list[str]) -> str:
    return " ".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _header_every() -> int:
    return max(2, shutil.get_terminal_size().lines - 1) if sys.stdout.isatty() else HEADER_EVERY
