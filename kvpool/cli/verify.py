"""`kvpool verify`: lets nodes check all that they hold, now."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli import with_settings
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, emit, table
from kvpool.cli.progress import progress
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.units import format_size
from kvpool.ops.settings import Settings

if TYPE_CHECKING:
    from kvpool.client.verifying import NodeVerified

_COLUMNS = ("node", "#blocks", "#bytes", "#bad", "#GB/s", "")

Nodes = Annotated[list[str] | None, typer.Argument(metavar="[NODE]...", help="Nodes to check; all by default.")]


@with_settings("client.pool", "client.timeout_s", *CLIENT_TLS_KEYS)
def verify(settings: Settings, output: Format, nodes: Nodes = None) -> None:
    """Compare every stored block with its checksum, as fast as memory allows.

    Bad blocks are no longer served, and their memory is not used again before the node restarts. Exit with 1 if any
    was found, 3 if a node could not be asked.
    """
    from kvpool.client.verifying import choose_nodes, verify_nodes  # noqa: PLC0415

    with connect_operator(settings) as pool:
        chosen = choose_nodes(pool.status().nodes, nodes or [])
        blocks = sum(segment.blocks for node in chosen for segment in node.segments)
        with progress("blocks", blocks, shown=output is Format.TEXT) as on_blocks:
            found = verify_nodes(chosen, settings.client.timeout_s, pool.credentials, on_blocks)
    emit({"nodes": [_record(node) for node in found]}, output, table(_COLUMNS, map(_row, found)))
    _check(found)


def _record(node: "NodeVerified") -> dict[str, object]:
    return {**asdict(node), "gb_per_s": _speed(node)}


def _row(node: "NodeVerified") -> tuple[object, ...]:
    return (
        node.node_id,
        f"{node.blocks:,}",
        format_size(node.size_bytes),
        node.bad,
        f"{_speed(node):.1f}",
        node.error or "",
    )


def _speed(node: "NodeVerified") -> float:
    return node.size_bytes / node.took_s / 1e9 if node.took_s else 0.0


def _check(found: "list[NodeVerified]") -> None:
    bad = {node.node_id: node.bad for node in found if node.bad}
    failed = [node.node_id for node in found if node.error is not None]
    unasked = f"; not checked: {', '.join(failed)}" if failed else ""
    if bad:
        where = ", ".join(f"{count} on {node_id}" for node_id, count in bad.items())
        raise KvpoolError(
            f"bad blocks found: {where}{unasked}; they are no longer served. Look at that host's memory, and restart "
            "the node to use those pages again"
        )
    if failed:
        raise UnavailableError(f"nodes that could not be asked: {', '.join(failed)}; see `kvpool status`")
