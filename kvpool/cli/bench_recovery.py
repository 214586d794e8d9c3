"""The tables of `kvpool bench recovery` and `kvpool bench replicas`."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from kvpool.bench import loss as losses
from kvpool.bench import recovery as recoveries
from kvpool.bench.loss import LossRow
from kvpool.bench.recovery import RecoveryRow
from kvpool.bench.replicas import ReplicaRow
from kvpool.cli.output import table, target


def recovery_views(rows: Sequence[object]) -> Iterator[RenderableType | None]:
    """The tables of their rows among others."""
    yield _recoveries(rows)
    yield _losses(rows)
    yield _replicas(rows)


def _recoveries(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            row.what.replace("_", " "),
            f"{row.blocks:,}",
            f"{row.seconds:.2f}",
            f"{row.cpu_s:.2f}",
            target(recoveries.TARGETS_S.get(row.what), "<="),
            f"{row.lookup_max_ms:.1f}",
        )
        for row in rows
        if isinstance(row, RecoveryRow)
    ]
    return (
        table(("whole again after", "#blocks", "#s", "#CPU s", "#target", "#slowest look-up ms"), cells)
        if cells
        else None
    )


def _losses(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (row.what, f"{row.lost_blocks:,}", f"{row.hit_rate:.1%}", f"{row.at_once:.2f}", f"{row.later:.2f}")
        for row in rows
        if isinstance(row, LossRow)
    ]
    if not cells:
        return None
    return Group(
        table(
            (f"1 of {losses.NODES} nodes lost", "#its blocks", "#hit rate", "#left at once", "#and after that"), cells
        ),
        f"Left: hits in the next {losses.WINDOW:.0%} of the requests, and in as many after them, part of those without "
        "the loss.",
    )


def _replicas(rows: Sequence[object]) -> RenderableType | None:
    cells = [(f"{row.copies}", f"{row.clients}", f"{row.gb_per_s:.2f}") for row in rows if isinstance(row, ReplicaRow)]
    return table(("#copies of a hot prefix", "#clients", "#GB/s over tcp"), cells) if cells else None
