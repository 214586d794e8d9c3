"""`kvpool top`: a pool, live."""

import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from kvpool.cli import with_settings
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, emit
from kvpool.cli.stat import record
from kvpool.cli.top_view import HISTORY, History, trouble, view
from kvpool.cli.watching import Frame, frames, keys, parse_interval, sleep
from kvpool.core.errors import UnavailableError
from kvpool.ops.settings import Settings

if TYPE_CHECKING:
    from kvpool.client import Client

Interval = Annotated[str, typer.Option("--interval", "-i", help="Time from one frame to the next.")]
Once = Annotated[bool, typer.Option("--once", help="Look for one interval, print one frame and leave.")]
Rows = Annotated[int, typer.Option("--namespaces", min=0, max=1000, help="Namespaces to show: those read the most.")]


@with_settings("client.pool", "client.timeout_s", *CLIENT_TLS_KEYS)
def top(
    settings: Settings, output: Format, *, interval: Interval = "1s", once: Once = False, namespaces: Rows = 8
) -> None:
    """Watch a pool: nodes, how full their tiers are, hit rate, bytes, evictions, namespaces. q or Ctrl-C leaves.

    Without a terminal, or with --format json, frames follow one another. Exit with 3 when the pool cannot be reached.
    """
    interval_s = parse_interval(interval)
    history: History = deque(maxlen=HISTORY)
    with connect_operator(settings) as pool:
        if once or output is Format.JSON or not sys.stdout.isatty():
            seen = frames(pool, interval_s, 2 if once else None, sleep)
            for i, frame in enumerate(seen):
                history.append(frame)
                if not once or i == 1:
                    emit(_record(frame), output, view(frame, history, settings.client.pool, namespaces))
            return
        try:
            _watch(pool, settings.client.pool, interval_s, history, namespaces)
        except KeyboardInterrupt:
            return


def _watch(pool: "Client", uri: str, interval_s: float, history: History, namespaces: int) -> None:
    """Draw until the user leaves; a pool that is gone may come back."""
    console = Console(highlight=False, markup=False)
    with keys() as pause, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for frame in frames(pool, interval_s, None, pause):
                    history.append(frame)
                    live.update(view(frame, history, uri, namespaces), refresh=True)
            except UnavailableError as error:
                if not history:
                    raise
                live.update(trouble(str(error), history[-1], history, uri, namespaces), refresh=True)
                if not pause(interval_s):
                    return
            else:
                return


def _record(frame: Frame) -> dict[str, object]:
    return {
        **record(frame),
        "nodes_moved_bytes_per_s": frame.rates.nodes,
        "by_namespace": list(frame.rates.namespaces.values()),
        "status": frame.status,
    }
