"""`kvpool demo`: runs engines against a real pool on this machine and shows what the pool saved them."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kvpool.bench.demo import ENGINES_MAX, NODES_MAX, DemoReport, DemoSettings, run_demo
from kvpool.bench.trace import read_trace
from kvpool.bench.workload import AgentSettings, Workload, agent_workload
from kvpool.core.units import format_size, parse_size

_EXIT_FAILED = 1
_EXIT_TERMINATED = 128 + signal.SIGTERM


class DemoFormat(StrEnum):
    """How the result is written to stdout."""

    TABLE = "table"
    JSON = "json"


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
    conversations: Annotated[int, typer.Option(min=1, help="Built-in agents: conversations.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Built-in agents: turns of a conversation.")] = 12,
    seed: Annotated[int, typer.Option(help="Built-in agents: same seed, same workload.")] = 1,
    output: Annotated[DemoFormat, typer.Option("--format", help="Table or JSON.")] = DemoFormat.TABLE,
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
    )
    if trace is not None:
        workload = read_trace(trace, block_tokens)
    else:
        agents = AgentSettings(
            conversations=conversations, turns=turns, block_tokens=block_tokens or 16, seed=seed
        )
        workload = agent_workload(agents)
    with _terminated_as_exit(), _progress(workload, shown=output is DemoFormat.TABLE) as on_request:
        report = run_demo(workload, settings, on_request)
    if output is DemoFormat.JSON:
        typer.echo(msgspec.json.encode(report))
    else:
        _show(report)
    if report.mismatches:
        raise typer.Exit(_EXIT_FAILED)


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Make SIGTERM unwind the stack, so that the pool's processes are stopped as after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(_EXIT_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(workload: Workload, *, shown: bool) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    disable = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task("requests", total=len(workload.requests))
        yield lambda: progress.advance(task)


def _show(report: DemoReport) -> None:
    console = Console(highlight=False)
    for line in _headlines(report):
        console.print(line, soft_wrap=True)
    for table in (_rates(report), _traffic(report), _places(report)):
        console.print(table)
    console.print(f"Hit rate: {report.definition}.", style="dim")


def _headlines(report: DemoReport) -> Iterator[str]:
    yield f"{report.workload}: {report.requests:,} requests, {report.input_tokens:,} tokens"
    yield (
        f"{report.unique_blocks:,} unique blocks of {report.block_tokens} tokens and "
        f"{format_size(report.settings.block_bytes)}, referred to {report.block_references:,} times"
    )


def _rates(report: DemoReport) -> Table:
    table = _table("prefix cache", "hit rate", "tokens computed")
    settings, tokens = report.settings, report.input_tokens
    for name, rate in (
        (f"private: {settings.engines} engines of {settings.engine_pages:,} blocks", report.private_hit_rate),
        ("the same engines with the pool", report.pool_hit_rate),
        ("ideal: one infinite cache", report.ideal_hit_rate),
    ):
        table.add_row(name, f"{rate:.1%}", f"{tokens * (1 - rate):,.0f}")
    return table


def _traffic(report: DemoReport) -> Table:
    table = _table("pool traffic", "blocks", "bytes", "GB/s within calls, mean of an engine")
    totals = report.totals
    for name, blocks, size_bytes, rate in (
        ("loaded", totals.loaded_blocks, totals.loaded_bytes, report.load_gb_s),
        ("stored", totals.stored_blocks, totals.stored_bytes, report.store_gb_s),
    ):
        table.add_row(name, f"{blocks:,}", format_size(size_bytes), "-" if rate is None else f"{rate:.2f}")
    table.add_row("promised, not delivered", f"{totals.undelivered_blocks:,}")
    table.add_row("refused", f"{totals.refused_blocks:,}")
    style = "bold red" if report.mismatches else "green"
    table.add_row("loaded with a wrong byte", f"{report.mismatches:,}", style=style)
    return table


def _places(report: DemoReport) -> Table:
    table = _table("store node", "blocks", "used", "of")
    for node in report.nodes:
        table.add_row(
            node.node_id, f"{node.blocks:,}", format_size(node.used_bytes), format_size(node.capacity_bytes)
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
