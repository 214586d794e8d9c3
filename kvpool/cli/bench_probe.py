"""`kvpool bench probe`: whether a tenant can tell by time what another one has."""

from typing import Annotated

import typer
from rich.console import Group

from kvpool.bench.probe import measure_probe
from kvpool.cli.output import Format, FormatOption, emit, table


def probe(
    *,
    samples: Annotated[int, typer.Option(min=1, help="Look-ups of each kind.")] = 5_000,
    output: FormatOption = Format.TEXT,
) -> None:
    """Time look-ups about another tenant's blocks and about nobody's, whose answers are the same."""
    rows = []
    for row in measure_probe(samples):
        rows.append(row)
        if output is Format.JSON:
            emit(row, output, "")
    if output is Format.TEXT:
        columns = ("look-up by", "#theirs p50 us", "#nobody's p50 us", "#told apart")
        cells = [(r.what, f"{r.theirs_p50_us:.1f}", f"{r.nobodys_p50_us:.1f}", f"{r.told_apart:.3f}") for r in rows]
        why = (
            "told apart: how probable it is that the slower of two answers is about the other tenant's; 0.5 is a guess."
        )
        emit(None, output, Group(table(columns, cells), why))
