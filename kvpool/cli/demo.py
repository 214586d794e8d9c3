"""`kvpool demo`: runs engines against a real pool on this machine and shows what the pool saved them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from kvpool.bench.demo import ENGINES_MAX, NODES_MAX, DemoReport, DemoSettings, run_demo
from kvpool.bench.trace import read_trace
from kvpool.bench.workload import AgentSettings, agent_workload
from kvpool.cli.output import Format, FormatOption, emit, table
from kvpool.cli.progress import progress
from kvpool.cli.signals import SESSION_ENDINGS, unwind_once
from kvpool.core.units import format_size, parse_size

_EXIT_FAILED = 1


def demo(
    *,
    engines: Annotated[int, typer.Option(min=1, max=ENGINES_MAX, help="Engines that share the pool.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, max=NODES_MAX, help="Store nodes, one process each.")] = 2,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay this Mooncake JSONL trace, plain or gzip, instead of built-in agents."),
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a block covers. [default: 16; of a trace: its own]")
    ] = None,
    block_bytes: Annotated[str, typer.Option(help="KV bytes of a block.")] = "16KiB",
    engine_pages: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks of each engine's own cache. [default: two longest prompts]"),
    ] = None,
    node_size: Annotated[
        str | None, typer.Option(help="Memory of each node. [default: enough for the whole workload]")
    ] = None,
    transports: Annotated[str, typer.Option(help="Transports to use, best first.")] = "shm,tcp",
    conversations: Annotated[int, typer.Option(min=1, help="Built-in agents: conversations.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Built-in agents: turns of a conversation.")] = 12,
    seed: Annotated[int, typer.Option(help="Built-in agents: same seed, same workload.")] = 1,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run engines against a real pool on this machine and compare hit rates without it, with it, and ideal.

    Every loaded block is compared byte for byte; a single mismatch ends the demo with exit code 1.
    """
    settings = DemoSettings(
        engines=engines,
        nodes=nodes,
        block_bytes=parse_size(block_bytes),
        engine_pages=engine_pages,
        node_bytes=parse_size(node_size) if node_size is not None else None,
        transports=tuple(name.strip() for name in transports.split(",")),
    )
    if trace is not None:
        workload = read_trace(trace, block_tokens)
    else:
        agents = AgentSettings(conversations=conversations, turns=turns, block_tokens=block_tokens or 16, seed=seed)
        workload = agent_workload(agents)
    unwind_once(SESSION_ENDINGS)
    with progress("requests", len(workload.requests), shown=output is Format.TEXT) as on_request:
        report = run_demo(workload, settings, on_request)
    emit(report, output, _view(report))
    if report.mismatches:
        raise typer.Exit(_EXIT_FAILED)


def _view(report: DemoReport) -> RenderableType:
    return Group(
        *_headlines(report),
        "",
        table(("prefix cache", "#hit rate", "#tokens computed"), _rates(report)),
        table(("pool traffic", "#blocks", "#bytes", "#GB/s"), _traffic(report)),
        table(("store node", "#blocks", "#used", "#of"), _places(report)),
        f"Mismatches: {report.mismatches} of {report.totals.loaded_blocks:,} loaded blocks, compared whole.",
        f"GB/s: of one engine, within its calls; all engines together took {report.elapsed_s:.1f} s.",
        f"Hit rate: {report.definition}.",
    )


def _headlines(report: DemoReport) -> Iterator[str]:
    yield f"{report.workload}: {report.requests:,} requests, {report.input_tokens:,} tokens"
    yield (
        f"{report.unique_blocks:,} unique blocks of {report.block_tokens} tokens and "
        f"{format_size(report.settings.block_bytes)}, referred to {report.block_references:,} times"
    )


def _rates(report: DemoReport) -> Iterator[tuple[str, ...]]:
    settings, tokens = report.settings, report.input_tokens
    for name, rate in (
        (f"private: {settings.engines} engines of {settings.engine_pages:,} blocks", report.private_hit_rate),
        ("the same engines with the pool", report.pool_hit_rate),
        ("ideal: one infinite cache", report.ideal_hit_rate),
    ):
        yield name, f"{rate:.1%}", f"{tokens * (1 - rate):,.0f}"


def _traffic(report: DemoReport) -> Iterator[tuple[str, ...]]:
    totals = report.totals
    for name, blocks, size_bytes, rate in (
        ("loaded", totals.loaded_blocks, totals.loaded_bytes, report.load_gb_s),
        ("stored", totals.stored_blocks, totals.stored_bytes, report.store_gb_s),
    ):
        yield name, f"{blocks:,}", format_size(size_bytes), "-" if rate is None else f"{rate:.2f}"
    for transport, size_bytes in report.loaded_by_transport.items():
        yield f"loaded over {transport}", "", format_size(size_bytes)
    yield "offered, not delivered", f"{totals.undelivered_blocks:,}"
    yield "refused by a checksum", f"{report.verify_failures:,}"
    yield "refused for want of room", f"{totals.refused_blocks:,}"


def _places(report: DemoReport) -> Iterator[tuple[str, ...]]:
    for node in report.nodes:
        yield node.node_id, f"{node.blocks:,}", format_size(node.used_bytes), format_size(node.capacity_bytes)
