"""`kvpool explain`: says why a look-up missed."""

import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli import with_settings
from kvpool.cli.asking import Where, find_where, read_hashes
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, emit, table
from kvpool.core.directory import Cause, MissReason
from kvpool.core.errors import UsageError
from kvpool.ops.settings import Settings

if TYPE_CHECKING:
    from kvpool.client.explaining import BlockExplanation, Explained

_COLUMNS = ("#block", "hash", "state", "because")

_CAUSES = {
    Cause.ROOM: "the pool was full, and it was the block unused for longest that no other needs",
    Cause.QUOTA: "its tenant had more than its quota, and it was the tenant's oldest",
    Cause.SCATTERED: "its node's free memory was too scattered for a new block",
    Cause.DEADLINE: "its writer did not finish in time",
    Cause.ABORTED: "its writer gave it up",
    Cause.GONE: "its node no longer has it",
    Cause.NODE_LOST: "its node was lost",
    Cause.READER: "a reader found that its bytes had changed",
    Cause.SCRUB: "its node found that its bytes had changed",
}

Hash = Annotated[str | None, typer.Option("--hash", help="One block: its hash as 64 hex digits.")]
Request = Annotated[
    str | None,
    typer.Option(help="File with a request's hashes, in order: one a line, or a JSON list. -: standard input."),
]
NamespaceOption = Annotated[
    str | None, typer.Option(help="Look there: an id, 8 or more digits of it, or a file with the document.")
]
Model = Annotated[str | None, typer.Option(help="Look in all namespaces of this model.")]


@with_settings("client.pool", "client.timeout_s", *CLIENT_TLS_KEYS)
def explain(
    settings: Settings,
    output: Format,
    *,
    hash: Hash = None,  # noqa: A002 - names the flag
    request: Request = None,
    namespace: NamespaceOption = None,
    model: Model = None,
) -> None:
    """Say why blocks are found or not: never stored, evicted, in another namespace, on a lost node, and so on.

    Without a namespace or a model, all namespaces are searched.
    """
    from kvpool.client.explaining import explain as ask  # noqa: PLC0415

    if (hash is None) == (request is None):
        raise UsageError("give either --hash HASH, or --request FILE with the hashes of a request")
    if namespace is not None and model is not None:
        raise UsageError("give --namespace or --model, not both")
    hashes = read_hashes(hash, request)
    with connect_operator(settings) as pool:
        where: Where = model if namespace is None else find_where(namespace, pool.status().namespaces)
        explained = ask(pool, hashes, where)
    emit(asdict(explained), output, table(_COLUMNS, _rows(explained)))


def _rows(explained: "Explained") -> list[tuple[str, str, str, str]]:
    """One row for neighbours of which the same is to be said."""
    rows = []
    said = [(block.reason or "held", _because(block, explained)) for block in explained.blocks]
    start = 0
    for what, group in itertools.groupby(said):
        end = start + len(list(group))
        shown = str(start) if end - start == 1 else f"{start}-{end - 1}"
        rows.append((shown, explained.blocks[start].hash[:16], *what))
        start = end
    return rows


def _because(block: "BlockExplanation", explained: "Explained") -> str:
    say = _held if block.reason is None else _SAY.get(block.reason, _left)
    return say(block, explained)


def _held(block: "BlockExplanation", _: "Explained") -> str:
    return f"it can be loaded{_on(block)}"


def _never(_: "BlockExplanation", explained: "Explained") -> str:
    since = f"since the service started {_seconds(explained.uptime_s)} ago"
    if explained.memory_s is not None:
        since = f"in the last {_seconds(explained.memory_s)}; what left before is forgotten (meta.tombstones)"
    return f"nobody has stored it {since}"


def _elsewhere(block: "BlockExplanation", _: "Explained") -> str:
    said = []
    for namespace, differences in block.elsewhere.items():
        fields = f", which differs: {'; '.join(differences)}" if differences else ""
        said.append(f"it is known in namespace {namespace[:16]}{fields}")
    return "; ".join(said)


def _recovering(block: "BlockExplanation", _: "Explained") -> str:
    return f"these nodes have not said yet what they hold: {', '.join(block.nodes)}"


def _in_flight(block: "BlockExplanation", _: "Explained") -> str:
    return f"{block.owner or 'somebody'} writes it{_on(block)}, and has {_seconds(block.deadline_s)} left"


def _parent_missing(block: "BlockExplanation", _: "Explained") -> str:
    return f"it is stored{_on(block)}, but block {block.missing[:16]} above it is not there: {block.missing_reason}"


def _left(block: "BlockExplanation", _: "Explained") -> str:
    cause = _CAUSES[Cause(block.cause)] if block.cause else "it left"
    pressure = f"; the pool was {100 * (block.fill or 0):.0f} % full" if block.reason == MissReason.EVICTED else ""
    return f"{_seconds(block.ago_s)} ago{_on(block)}: {cause}{pressure}; last used {_seconds(block.idle_s)} before"


_SAY: dict[MissReason, Callable[["BlockExplanation", "Explained"], str]] = {
    MissReason.COLD: _never,
    MissReason.WRONG_NAMESPACE: _elsewhere,
    MissReason.RECOVERING: _recovering,
    MissReason.IN_FLIGHT: _in_flight,
    MissReason.PARENT_MISSING: _parent_missing,
}
"""For every other reason the block has been here, and has left."""


def _on(block: "BlockExplanation") -> str:
    return f" ({', '.join(block.nodes)})" if block.nodes else ""


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.3g} s"
