"""A progress bar on stderr for what takes longer than a moment."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress(what: str, total: int | None, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Count up to ``total`` by calling what this gives, with how many more if it is not one.

    Without a total, which nobody may know before the end, it shows that something goes on, and for how long. Nothing is
    drawn unless ``shown`` and stderr is a terminal.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    disable = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(what, total=total)

        def advance(more: int = 1) -> None:
            bar.advance(task, more)

        yield advance
