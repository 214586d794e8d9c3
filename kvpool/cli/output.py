"""Output: decides how results reach stdout: tables and lines for people, one JSON line for programs."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from kvpool.core.errors import KvpoolError


class Format(StrEnum):
    """How results and errors are written."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Text for people or JSON for programs.")]
"""The one ``--format`` that all commands share."""


class UnhealthyError(KvpoolError):
    """The pool answers, and says that it is not well."""


def emit(record: object, output: Format, text: RenderableType) -> None:
    """Write a result: ``record`` (anything msgspec can encode) as one JSON line, or ``text``; flushed."""
    if output is Format.JSON:
        typer.echo(msgspec.json.encode(msgspec.to_builtins(record, enc_hook=str)))
    elif isinstance(text, str):
        typer.echo(text)  # as it is: rich would wrap a line that a program may be waiting for
    else:
        Console(highlight=False, markup=False).print(text)


def shown(text: str, most: int = 60) -> str:
    """What others named, to print: no control characters that would move a terminal's cursor, and not without end."""
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[: most + 1])
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table for ``emit``; a column whose name starts with ``#`` holds numbers and is right-aligned."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith("#") else "left"
        result.add_column(name.lstrip("#"), justify=justify, overflow="fold")
    for row in rows:
        result.add_row(*(str(cell) for cell in row))
    return result


def target(value: float | None, relation: str) -> str:
    """A cell that says what should be reached: ``>= 0.8``."""
    return "-" if value is None else f"{relation} {value:,g}"
