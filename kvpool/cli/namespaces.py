"""`kvpool namespaces`: what each namespace holds and hits, and in which fields two of them differ."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import RenderableType

from kvpool.cli import with_settings
from kvpool.cli.asking import find_where
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, emit, shown, table
from kvpool.core.errors import UnknownNamespaceError
from kvpool.core.namespace import FieldDifference, Namespace, parse_namespace
from kvpool.core.units import format_size
from kvpool.ops.settings import Settings

if TYPE_CHECKING:
    from kvpool.client import NamespaceStatus, PoolStatus

_COLUMNS = ("namespace", "model", "tenant", "#blocks", "#bytes", "#hit rate", "#read", "#stored")

Diff = Annotated[
    tuple[str, str] | None,
    typer.Option("--diff", metavar="A B", help="Two namespaces: ids, 8 or more digits of them, or files of documents."),
]


@with_settings("client.pool", "client.timeout_s", *CLIENT_TLS_KEYS)
def namespaces(settings: Settings, output: Format, diff: Diff = None) -> None:
    """Show the namespaces: blocks, bytes, hits, and all fields with --format json; or in which fields two differ.

    Hit rate, read and stored are since the metadata service's start. Engines share blocks exactly when their
    namespaces have no difference.
    """
    with connect_operator(settings) as pool:
        status = pool.status()
    if diff is None:
        emit(_records(status), output, table(_COLUMNS, [_row(usage, _of(status, usage)) for usage in status.usage]))
        return
    left, right = (_meant(text, status) for text in diff)
    differences = left.difference(right)
    emit({"left": left, "right": right, "differences": differences}, output, _diff_text(differences))


def _records(status: "PoolStatus") -> dict[str, object]:
    records = [{**msgspec.structs.asdict(_of(status, usage)), **msgspec.to_builtins(usage)} for usage in status.usage]
    return {"namespaces": records}


def _of(status: "PoolStatus", usage: "NamespaceStatus") -> Namespace:
    return parse_namespace(status.namespaces[usage.namespace].encode())


def _row(usage: "NamespaceStatus", namespace: Namespace) -> tuple[str, ...]:
    return (
        usage.namespace[:8],
        shown(namespace.model),
        shown(namespace.tenant),
        f"{usage.blocks:,}",
        format_size(usage.size_bytes),
        f"{usage.matched_blocks / usage.asked_blocks:.1%}" if usage.asked_blocks else "-",
        format_size(usage.read_bytes),
        format_size(usage.stored_bytes),
    )


def _meant(text: str, status: "PoolStatus") -> Namespace:
    found = find_where(text, status.namespaces, "--diff")
    if isinstance(found, Namespace):
        return found
    document = status.namespaces.get(found.hex())
    if document is None:
        raise UnknownNamespaceError(f"--diff {text[:16]}: no such namespace is open; see `kvpool namespaces`")
    return parse_namespace(document.encode())


def _diff_text(differences: list[FieldDifference]) -> RenderableType:
    if not differences:
        return "no difference: engines with these share blocks"
    rows = [(d.field, shown(repr(d.left)), shown(repr(d.right))) for d in differences]
    return table(("field", "left", "right"), rows)
