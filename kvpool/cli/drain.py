"""`kvpool drain`: empties a node and lets it leave, and shows how far that has come."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli import ConfigOption
from kvpool.cli.connecting import connect_operator
from kvpool.cli.output import Format, FormatOption, emit
from kvpool.cli.progress import progress
from kvpool.core.errors import KvpoolError
from kvpool.core.units import format_size, parse_duration
from kvpool.ops.logging import configure
from kvpool.ops.sources import field_of, load_settings

if TYPE_CHECKING:
    from kvpool.client import Client, DrainStatus

POLL_S = 0.2

_REASONS = {
    "no_room": "the other nodes have no room for more",
    "timeout": "the time was over",
    "failed": "they could not be copied",
}


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's id, as `kvpool status` shows it.")],
    *,
    pool: Annotated[str | None, typer.Option("--pool", help="The pool's metadata service.")] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", help="Time for copying, at most 24h; the rest stays behind.")
    ] = "5m",
    stay: Annotated[bool, typer.Option("--stay", help="Keep the node in the pool, without new blocks.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="End a drain: place blocks on the node again.")] = False,
    tls_dir: Annotated[str | None, typer.Option("--tls-dir", help=field_of("tls.dir").description)] = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Copy a node's blocks to other nodes, the most recently used first, then let its process end.

    Ctrl-C ends the watching, not the drain: the same command goes on with it, --cancel ends it. Exits with 1 when the
    node was lost, or the drain cancelled, before it was over.
    """
    settings = load_settings(config, {"client.pool": pool, "tls.dir": tls_dir})
    configure(settings.log)
    timeout_s = parse_duration(timeout)
    with connect_operator(settings) as client:
        if cancel:
            cancelled = client.cancel_drain(node)
            emit(cancelled, output, f"{node}: the drain is cancelled; blocks are placed there again")
            return
        done = _watch(client, client.drain(node, drain_timeout_s=timeout_s, stay=stay), stay=stay, output=output)
    emit(done, output, _text(done))
    if done.state in {"lost", "cancelled"}:
        raise KvpoolError(f"node {node}: {'lost before it was drained' if done.state == 'lost' else 'drain cancelled'}")


def _watch(client: "Client", status: "DrainStatus", *, stay: bool, output: Format) -> "DrainStatus":
    """Show progress until the drain is over, and the node gone if it is to leave."""
    with progress(f"{status.node_id}: blocks copied", status.blocks, shown=output is Format.TEXT) as on_blocks:
        on_blocks(status.blocks - status.left_blocks)
        while status.state == "copying" or (status.state == "drained" and not stay):
            time.sleep(POLL_S)
            before, status = status, client.drain_status(status.node_id)
            on_blocks(before.left_blocks - status.left_blocks)
    return status


def _text(status: "DrainStatus") -> str:
    kept = f"{status.node_id}: {status.state}, {status.blocks - status.left_blocks:,} of {status.blocks:,} blocks kept"
    if not status.left_blocks:
        return kept
    size, reason = format_size(status.left_bytes), _REASONS.get(status.reason, status.reason)
    return f"{kept}, {status.left_blocks:,} ({size}) left behind" + (f": {reason}" if reason else "")
