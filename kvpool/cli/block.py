"""`kvpool block`: where one block is, and what holds it there."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType

from kvpool.cli import with_settings
from kvpool.cli.asking import Where, find_where, read_hashes
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, emit, shown, table
from kvpool.core.errors import KvpoolError, UsageError
from kvpool.core.namespace import parse_namespace
from kvpool.core.units import format_size
from kvpool.ops.settings import Settings

if TYPE_CHECKING:
    from kvpool.client import PoolStatus
    from kvpool.client.blocks import BlockStatus, CopyStatus

CHILDREN_MAX = 100

_COLUMNS = ("node", "medium", "segment", "#shard", "#slot", "#generation", "checksum", "")

Hash = Annotated[str, typer.Argument(metavar="HASH", help="The block: 64 hex digits.")]
NamespaceOption = Annotated[
    str | None, typer.Option(help="Look there: an id, 8 or more digits of it, or a file with the document.")
]
Model = Annotated[str | None, typer.Option(help="Look in all namespaces of this model.")]


@with_settings("client.pool", "client.timeout_s", *CLIENT_TLS_KEYS)
def block(
    settings: Settings,
    output: Format,
    hash: Hash,  # noqa: A002 - names the argument
    namespace: NamespaceOption = None,
    model: Model = None,
) -> None:
    """Show a block's copies (node, segment, slot, generation), leases, pins, last use, size, parent and children.

    Without a namespace or a model, all namespaces are searched. Nothing is touched. Exit with 1 when none has it.
    """
    from kvpool.client.blocks import find_block  # noqa: PLC0415

    if namespace is not None and model is not None:
        raise UsageError("give --namespace or --model, not both")
    [block_hash] = read_hashes(hash, None, "HASH")
    with connect_operator(settings) as pool:
        status = pool.status()
        where: Where = model if namespace is None else find_where(namespace, status.namespaces)
        found = find_block(pool, block_hash, where)
    emit({"hash": block_hash.hex(), "blocks": [asdict(one) for one in found]}, output, _view(found, status))
    if not found:
        raise KvpoolError(f"no entry of block {block_hash.hex()[:16]}; `kvpool explain --hash` says why")


def _view(found: "tuple[BlockStatus, ...]", status: "PoolStatus") -> RenderableType:
    return Group(*(part for one in found for part in _block(one, status)))


def _block(one: "BlockStatus", status: "PoolStatus") -> Iterator[RenderableType]:
    document = status.namespaces.get(one.namespace)
    model = f" ({shown(parse_namespace(document.encode()).model)})" if document else ""
    yield f"namespace  {one.namespace[:16]}{model}"
    yield f"state      {one.state}, last used {one.idle_s:.3g} s ago"
    yield f"size       {format_size(one.block_bytes)} a shard, in a slot of {format_size(one.slot_bytes)}"
    yield f"parent     {one.parent or 'none: the first of its chain'}"
    yield f"children   {one.children}{' or more' if one.children == CHILDREN_MAX else ''}"
    yield f"held by    {_holds(one)}"
    yield table(_COLUMNS, map(_copy, one.copies))


def _holds(one: "BlockStatus") -> str:
    holds = []
    if one.leases:
        holds.append(f"{one.leases} lease{'s' if one.leases > 1 else ''}, {one.leased_s:.3g} s left")
    if one.pinned:
        holds.append(
            "a pin" + (f", {one.pinned_s:.3g} s left" if one.pinned_s is not None else " until it is unpinned")
        )
    if one.children:
        holds.append("its children: it goes after them")
    return "; ".join(holds) or "nothing: it may be evicted"


def _copy(copy: "CopyStatus") -> tuple[object, ...]:
    slot = "being written" if copy.slot is None else copy.slot
    segment = f"{copy.segment_id[:8]} (#{copy.segment})"
    note = "further copy" if copy.surplus else ""
    return copy.node_id, copy.medium, segment, copy.shard, slot, copy.generation, copy.checksum, note
