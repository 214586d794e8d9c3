"""A progress bar on stderr for what takes longer than a moment."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


@contextlib.contextmanager
def progress(what: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Count up to ``total`` by calling what this gives; nothing is drawn unless ``shown`` and stderr is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    disable = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
