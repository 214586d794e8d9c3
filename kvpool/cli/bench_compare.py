"""`kvpool bench compare`: what fell between two runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from kvpool.bench.compare import Change, compare_rows, read_rows
from kvpool.cli.output import Format, FormatOption, emit, table
from kvpool.core.errors import UsageError

_EXIT_FELL = 1


def compare(
    before: Annotated[Path, typer.Argument(help="Rows of the earlier run (`--format json`, or `make bench`).")],
    after: Annotated[Path, typer.Argument(help="Rows of the later run.")],
    *,
    tolerance: Annotated[float, typer.Option(min=0, max=1, help="Part of a value that counts as noise.")] = 0.1,
    timed: Annotated[
        bool, typer.Option("--timed", help="Compare times and rates too: both runs are of one quiet machine.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Compare two runs; ends with exit code 1 if a ratio, hit rate or memory is worse, or a row is missing."""
    changes = list(compare_rows(read_rows(before), read_rows(after), tolerance, timed=timed))
    if not changes:
        raise UsageError(f"{before} has nothing to compare with; give rows of `kvpool bench all --save FILE`")
    emit(changes, output, _view(changes, tolerance))
    if any(change.fell for change in changes):
        raise typer.Exit(_EXIT_FELL)


def _view(changes: Sequence[Change], tolerance: float) -> RenderableType:
    cells = [
        (
            change.bench.replace("_", " "),
            change.what,
            change.measure,
            f"{change.before:.4g}",
            "-" if change.after is None else f"{change.after:.4g}",
            "missing" if change.after is None else "FELL" if change.fell else "",
        )
        for change in changes
    ]
    fell = sum(change.fell for change in changes)
    return Group(
        table(("bench", "of", "measure", "#before", "#after", ""), cells),
        f"{fell} of {len(changes)} fell by more than {tolerance:.0%}.",
    )
