"""Draws hit rate against capacity. Needs matplotlib, which nothing else does: ``pip install 'kvpool[plot]'``."""

from collections.abc import Sequence
from pathlib import Path

from kvpool.bench.simulate import SimulateRow
from kvpool.core.errors import UsageError


def plot(rows: Sequence[SimulateRow], title: str, path: Path) -> None:
    """Write a PNG with one line a policy, dashed for private caches, and the ideal as a dotted one.

    Raises:
        UsageError: matplotlib is not installed, or ``path`` cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - heavy, and only here

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((row for row in rows if row.policy == policy), key=lambda row: row.capacity)
        capacities = [100 * row.capacity for row in points]
        (line,) = axes.plot(capacities, [100 * row.hit_rate for row in points], marker="o", label=policy)
        private = [100 * row.private_hit_rate for row in points if row.private_hit_rate is not None]
        if private:
            label = f"{policy}, {points[0].engines} private caches"
            axes.plot(capacities, private, linestyle="--", color=line.get_color(), label=label)
    if rows:
        axes.axhline(100 * rows[0].ideal_hit_rate, linestyle=":", color="gray", label="infinite cache")
    axes.set(title=title, xlabel="capacity, % of the unique blocks", ylabel="hit rate, % of the input tokens")
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(f"plot {str(path)!r} cannot be written: {error}; give another file") from error


def require_matplotlib(option: str = "--plot") -> None:
    """Raise UsageError that names ``option`` where it is missing: before minutes of simulation, not after."""
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415
    except ImportError as error:
        raise UsageError(f"{option} needs matplotlib; install it: pip install 'kvpool[plot]'") from error
