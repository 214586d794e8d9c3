"""`kvpool bench trace`: replays a trace against a real pool on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Group, RenderableType

from kvpool.bench.demo import ENGINES_MAX, NODES_MAX
from kvpool.bench.formats import read_workload
from kvpool.bench.hitrate import DEFINITION
from kvpool.bench.plot import require_matplotlib
from kvpool.bench.trace_report import write_report
from kvpool.bench.trace_run import Loop, TraceRow, TraceSettings, run_trace
from kvpool.cli.output import Format, FormatOption, emit, table
from kvpool.cli.progress import progress
from kvpool.core.units import format_size, parse_size

_EXIT_FAILED = 1


def trace(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="As for kvpool simulate.")],
    *,
    capacity: Annotated[str, typer.Option(help="Room of the pool, part of the trace's unique blocks.")] = "10%",
    policy: Annotated[Literal["lru", "default"], typer.Option(help="Eviction policy of the pool.")] = "lru",
    loop: Annotated[
        Loop, typer.Option(help="Requests begin when a caller is free (closed) or when they arrived (open).")
    ] = Loop.CLOSED,
    speed: Annotated[float, typer.Option(help="Open loop: times faster than in the trace.")] = 1.0,
    callers: Annotated[int, typer.Option(min=1, max=ENGINES_MAX, help="Callers, a connection each.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=NODES_MAX, help="Store nodes, one process each.")] = 2,
    block_bytes: Annotated[str, typer.Option(help="KV bytes of a block.")] = "16KiB",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a block covers. [default: the trace's own; of text: 16]")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A model's tokenizer.json, for sessions of text.")] = None,
    transports: Annotated[str, typer.Option(help="Transports to use, best first.")] = "shm,tcp",
    report: Annotated[
        Path | None, typer.Option(help="Write a page with plots to this HTML file (needs matplotlib).")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Replay a trace against real services with real bytes; compares the hit rate with the simulator's.

    The two agree within half a point for lru. The policy default learns from the time between uses, which the simulator
    takes from the trace: it agrees in an open loop at speed 1, where the pool sees the same times.

    Every loaded block is compared byte for byte; a single mismatch ends the command with exit code 1.
    """
    settings = TraceSettings(
        capacity=capacity,
        policy=policy,
        loop=loop,
        speed=speed,
        callers=callers,
        nodes=nodes,
        block_bytes=parse_size(block_bytes),
        transports=tuple(name.strip() for name in transports.split(",")),
    )
    if report is not None:
        require_matplotlib("--report")
    workload = read_workload(path, block_tokens, tokenizer)
    with progress("requests", len(workload.requests), shown=output is Format.TEXT) as on_request:
        run = run_trace(workload, settings, on_request)
    emit(run.row, output, _view(run.row))
    if report is not None:
        write_report(run, report)
    if run.row.mismatches:
        raise typer.Exit(_EXIT_FAILED)


def _view(row: TraceRow) -> RenderableType:
    settings = row.settings
    rates = (
        ("this pool", f"{row.hit_rate:.1%}"),
        ("simulated", f"{row.simulated_hit_rate:.1%}"),
        ("infinite cache", f"{row.ideal_hit_rate:.1%}"),
    )
    return Group(
        f"{row.workload}: {row.requests:,} requests, {settings.loop} loop, {settings.callers} callers, "
        f"{settings.nodes} nodes, {row.capacity_blocks:,} blocks of {format_size(settings.block_bytes)}, "
        f"policy {settings.policy}",
        "",
        table((f"capacity {settings.capacity}", "#hit rate"), rates),
        table(("call", "#calls", "#p50 ms", "#p90 ms", "#p99 ms", "#max ms", "#GB/s"), _steps(row)),
        table(("pool", "#"), _counts(row)),
        f"Mismatches: {row.mismatches} in {format_size(row.loaded_bytes)} of loaded blocks, compared whole.",
        f"Hit rate: {DEFINITION}.",
    )


def _steps(row: TraceRow) -> Iterator[tuple[str, ...]]:
    for step in row.steps:
        times = (f"{ms:.3f}" for ms in (step.p50_ms, step.p90_ms, step.p99_ms, step.max_ms))
        yield step.step, f"{step.calls:,}", *times, "-" if step.gb_s is None else f"{step.gb_s:.2f}"


def _counts(row: TraceRow) -> Iterator[tuple[str, str]]:
    yield "loaded", format_size(row.loaded_bytes)
    for transport, size_bytes in row.loaded_by_transport.items():
        yield f"loaded over {transport}", format_size(size_bytes)
    yield "stored", format_size(row.stored_bytes)
    yield "blocks evicted", f"{row.evicted_blocks:,}"
    yield "blocks refused for want of room", f"{row.refused_blocks:,}"
    if row.late_p99_ms is not None:
        yield "requests late, p99 ms", f"{row.late_p99_ms:.1f}"
    yield "seconds", f"{row.elapsed_s:.1f}"
    if row.cpu_s_per_gb is not None:
        yield "CPU s/GB moved, computing included", f"{row.cpu_s_per_gb:.2f}"
