"""Tables of `kvpool bench vllm`."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from kvpool.bench.vllm_rows import (
    TARGET_ABOVE_LOCAL_MS,
    TARGET_DECODE,
    TARGET_SAVING,
    TARGETS_OF_MOONCAKE,
    VllmDecodeRow,
    VllmRow,
    VllmSavingRow,
)
from kvpool.cli.output import table, target


def vllm_views(rows: Sequence[object]) -> Iterator[RenderableType]:
    """A table for each kind of row that there is."""
    for view in (_times(rows), _savings(rows), _decodes(rows)):
        if view is not None:
            yield view


def _times(rows: Sequence[object]) -> RenderableType | None:
    shown = [row for row in rows if isinstance(row, VllmRow)]
    if not shown:
        return None
    cells = [
        (
            row.path,
            f"{row.ttft_p50_s * 1e3:,.0f}",
            f"{row.ttft_min_s * 1e3:,.0f}",
            f"{row.tokens_loaded:,}",
            _number(row.of_mooncake),
            target(TARGETS_OF_MOONCAKE.get(row.path), "<="),
            _number(row.above_local_ms),
            target(TARGET_ABOVE_LOCAL_MS.get(row.path), "<="),
        )
        for row in shown
    ]
    columns = ("path", "#p50 ms", "#least ms", "#loaded", "#of mooncake", "#target", "#above local", "#target")
    return Group(
        f"vLLM on this machine's processors: time to first token of {shown[0].prompt_tokens:,} tokens",
        table(columns, cells),
        f"Medians of {shown[0].rounds} rounds and of their ratios; loaded: tokens that were not computed.",
    )


def _savings(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            row.path,
            f"{row.ttft_p50_s * 1e3:,.0f}",
            f"{row.of_none:.3f}",
            target(TARGET_SAVING, "<=") if row.path.startswith("kvpool") else "-",
            f"{row.landed_p50_s * 1e3:.0f}",
        )
        for row in rows
        if isinstance(row, VllmSavingRow)
    ]
    columns = ("computed and saved", "#p50 ms", "#of not saved", "#target", "#landed after ms")
    return table(columns, cells) if cells else None


def _decodes(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            row.path,
            f"{row.alone_p50_ms:.2f}",
            f"{row.loading_p50_ms:.2f}",
            f"{row.ratio:.3f}",
            target(TARGET_DECODE, "<="),
            f"{row.alone_steps} / {row.loading_steps}",
        )
        for row in rows
        if isinstance(row, VllmDecodeRow)
    ]
    columns = ("step of a running request", "#alone ms", "#beside a load", "#ratio", "#target", "#steps")
    return table(columns, cells) if cells else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
