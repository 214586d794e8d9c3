"""`kvpool simulate`: replays a trace against the directory and shows how large a pool it needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from kvpool.bench.formats import read_workload
from kvpool.bench.hitrate import DEFINITION
from kvpool.bench.plot import plot as draw
from kvpool.bench.plot import require_matplotlib
from kvpool.bench.simulate import (
    CAPACITIES,
    ENGINES_MAX,
    NEAR_IDEAL,
    POLICIES,
    SimulateRow,
    SimulateSettings,
    advice,
)
from kvpool.bench.simulate import (
    simulate as run,
)
from kvpool.bench.workload import Workload
from kvpool.cli.output import Format, FormatOption, emit, table
from kvpool.cli.progress import progress
from kvpool.cli.signals import SESSION_ENDINGS, unwind_once
from kvpool.core.units import format_size, parse_size


def simulate(
    trace: Annotated[Path, typer.Argument(help="Trace: Mooncake's JSONL, or sessions of text; plain or gzip.")],
    *,
    capacity: Annotated[
        str, typer.Option(help="Sizes of the pool: parts of the unique blocks (10%), or sizes (64GiB).")
    ] = CAPACITIES,
    policy: Annotated[str, typer.Option(help=f"One or more of {','.join(POLICIES)}.")] = "default",
    engines: Annotated[
        int, typer.Option(min=1, max=ENGINES_MAX, help="Engines; with several, what private caches hit is shown too.")
    ] = 1,
    bytes_per_token: Annotated[
        str | None, typer.Option(help="KV bytes of a token, all layers and ranks together, such as 38kB.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a block covers. [default: the trace's own; of text: 16]")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A model's tokenizer.json, for sessions of text.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to this PNG file (needs matplotlib).")] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Replay a trace against the real directory, on the trace's own clock: hit rate against capacity.

    Nothing is started and no bytes are moved: what is simulated is which blocks the pool would hold.
    """
    settings = SimulateSettings(
        policies=_words(policy),
        capacities=_words(capacity),
        engines=engines,
        bytes_per_token=None if bytes_per_token is None else parse_size(bytes_per_token),
    )
    if plot is not None:
        require_matplotlib()
    unwind_once(SESSION_ENDINGS)
    workload = read_workload(trace, block_tokens, tokenizer)
    rows: list[SimulateRow] = []
    passes = len(settings.policies) * len(settings.capacities)
    with progress("requests", passes * len(workload.requests), shown=output is Format.TEXT) as on_request:
        for row in run(workload, settings, on_request):
            rows.append(row)
            if output is Format.JSON:
                emit(row, output, "")
    if output is Format.TEXT:
        emit(None, output, _view(workload, settings, rows))
    if plot is not None:
        draw(rows, workload.name, plot)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _view(workload: Workload, settings: SimulateSettings, rows: Sequence[SimulateRow]) -> RenderableType:
    head = (
        f"{workload.name}: {len(workload.requests):,} requests, {workload.input_tokens:,} tokens\n"
        f"{workload.unique_blocks():,} unique blocks of {workload.block_tokens} tokens, "
        f"referred to {workload.block_references:,} times"
    )
    columns = ["policy", "#capacity", "#blocks", "#size", "#hit rate", "#of the ideal"]
    columns += [f"#{settings.engines} private caches"] if settings.engines > 1 else []
    notes = [_advice(rows, name) for name in settings.policies]
    return Group(head, "", table(columns, map(_cells, rows)), *notes, f"Hit rate: {DEFINITION}.")


def _cells(row: SimulateRow) -> Sequence[object]:
    private = [] if row.private_hit_rate is None else [f"{row.private_hit_rate:.1%}"]
    return (
        row.policy,
        f"{row.capacity:.4g}" if row.capacity < 0.01 else f"{row.capacity:.1%}",
        f"{row.capacity_blocks:,}",
        "-" if row.capacity_bytes is None else format_size(row.capacity_bytes),
        f"{row.hit_rate:.1%}",
        f"{row.hit_rate / row.ideal_hit_rate:.0%}" if row.ideal_hit_rate else "-",
        *private,
    )


def _advice(rows: Sequence[SimulateRow], policy: str) -> str:
    enough = advice(rows, policy)
    if enough is None:
        return (
            f"{policy}: no capacity asked for hits {NEAR_IDEAL:.0%} of what an infinite cache would; try larger ones."
        )
    size = f"{enough.capacity_blocks:,} blocks"
    if enough.capacity_bytes is not None:
        size = format_size(enough.capacity_bytes)
    return (
        f"{policy}: {enough.hit_rate:.1%} needs {size}: at least {NEAR_IDEAL:.0%} of the {enough.ideal_hit_rate:.1%} "
        "that an infinite cache hits."
    )
