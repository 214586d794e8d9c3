"""Writes a replay as one HTML file with its plots inside, to be read without a network."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.bench.measure import GB
from kvpool.bench.trace_run import TraceRun
from kvpool.core.errors import UsageError
from kvpool.core.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d2733}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .9rem;border-bottom:1px solid #d8dee6}"
    "td+td,th+th{text-align:right}img{max-width:100%}h1{font-size:1.4rem}"
)


def write_report(run: TraceRun, path: Path) -> None:
    """Write the page.

    Raises:
        UsageError: matplotlib is not installed, or ``path`` cannot be written.
    """
    try:
        path.write_text(_page(run), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"report {str(path)!r} cannot be written: {error}; give another file") from error


def _page(run: TraceRun) -> str:
    row = run.row
    title = html.escape(f"{row.workload} at {row.settings.capacity}, policy {row.settings.policy}")
    rates = [
        ("hit rate", f"{row.hit_rate:.2%}"),
        ("simulated", f"{row.simulated_hit_rate:.2%}"),
        ("infinite cache", f"{row.ideal_hit_rate:.2%}"),
        ("requests", f"{row.requests:,}"),
        ("loaded", format_size(row.loaded_bytes)),
        ("stored", format_size(row.stored_bytes)),
        ("blocks evicted", f"{row.evicted_blocks:,}"),
        ("CPU s/GB moved", "-" if row.cpu_s_per_gb is None else f"{row.cpu_s_per_gb:.2f}"),
        ("seconds", f"{row.elapsed_s:.1f}"),
    ]
    steps = [("call", "calls", "p50 ms", "p90 ms", "p99 ms", "max ms", "GB/s")] + [
        (
            s.step,
            f"{s.calls:,}",
            f"{s.p50_ms:.3f}",
            f"{s.p90_ms:.3f}",
            f"{s.p99_ms:.3f}",
            f"{s.max_ms:.1f}",
            _or(s.gb_s),
        )
        for s in row.steps
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{_table(rates)}{_table(steps)}"
        f'<img alt="hit rate and throughput over time, latencies of each call" src="{_plots(run)}">'
    )


def _or(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _plots(run: TraceRun) -> str:
    """The plots as a data URL."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - heavy, and only here

    figure = Figure(figsize=(10, 9), layout="constrained")
    rates, speeds, times = figure.subplots(3, 1)
    _plot_rates(rates, run)
    _plot_speeds(speeds, run)
    _plot_times(times, run)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _plot_rates(axes: "Axes", run: TraceRun) -> None:
    axes.plot([m.requests for m in run.course], [100 * m.totals.hit_rate for m in run.course], label="so far")
    axes.axhline(100 * run.row.simulated_hit_rate, linestyle="--", color="gray", label="simulated, whole trace")
    axes.axhline(100 * run.row.ideal_hit_rate, linestyle=":", color="gray", label="infinite cache, whole trace")
    axes.set(xlabel="requests", ylabel="hit rate, %", ylim=(0, 100))
    axes.legend()


def _plot_speeds(axes: "Axes", run: TraceRun) -> None:
    """What was moved in each slice, over the time that it took, computing included."""
    course = run.course
    for what in ("loaded_bytes", "stored_bytes"):
        moved = [getattr(m.totals, what) for m in course]
        speeds = [
            (after - before) / max(1e-9, b.at_s - a.at_s) / GB
            for before, after, a, b in zip(moved, moved[1:], course, course[1:], strict=False)
        ]
        axes.plot([m.at_s for m in course[1:]], speeds, label=what.removesuffix("_bytes"))
    axes.set(xlabel="seconds", ylabel="GB/s of all callers")
    axes.legend()


def _plot_times(axes: "Axes", run: TraceRun) -> None:
    for step, times_s in run.times_s.items():
        if times_s:
            ordered = sorted(1e3 * s for s in times_s)
            shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
            axes.plot(ordered, shares, label=step)
    axes.set(xscale="log", xlabel="milliseconds a call", ylabel="calls that took no longer, %", ylim=(0, 100))
    axes.legend()
