"""`kvpool demo-vllm`: two real vLLM engines share a pool; shows what each way to a first token takes."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from kvpool.bench.vllm_demo import VllmDemoReport, VllmDemoSettings, run_vllm_demo
from kvpool.cli.output import Format, FormatOption, emit, table
from kvpool.cli.signals import SESSION_ENDINGS, unwind_once
from kvpool.core.units import format_size
from kvpool.ops.logging import configure
from kvpool.ops.settings import LogSettings

_EXIT_FAILED = 1


def demo_vllm(
    *,
    prompts: Annotated[int, typer.Option(help="Prompts that both engines answer.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = VllmDemoSettings().prompt_tokens,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = VllmDemoSettings().answer_tokens,
    nodes: Annotated[int, typer.Option(help="Store nodes.")] = 2,
    transports: Annotated[str, typer.Option(help="Transports to use, best first.")] = "shm,tcp",
    output: FormatOption = Format.TEXT,
) -> None:
    """Run two vLLM engines with a tiny model on the processors, and load in one what the other computed.

    An answer that differs between computed, loaded and locally cached ends the demo with exit code 1.
    """
    configure(LogSettings(level="warning"))
    unwind_once(SESSION_ENDINGS)
    settings = VllmDemoSettings(
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        nodes=nodes,
        transports=tuple(name.strip() for name in transports.split(",")),
    )
    report = run_vllm_demo(settings, lambda text: typer.echo(f"{text} ...", err=True))
    emit(report, output, _view(report))
    if report.identical < settings.prompts:
        raise typer.Exit(_EXIT_FAILED)


def _view(report: VllmDemoReport) -> RenderableType:
    settings = report.settings
    return Group(
        f"vLLM {report.vllm}, two engines, {settings.prompts} prompts of {settings.prompt_tokens:,} tokens",
        "",
        table(("time to first token", "#ms", "#tokens computed"), _times(report)),
        table(
            ("store node", "#blocks", "#used", "#of"),
            (
                (n.node_id, f"{n.blocks:,}", format_size(n.used_bytes), format_size(n.capacity_bytes))
                for n in report.nodes
            ),
        ),
        f"Identical answers, computed, loaded and cached: {report.identical} of {settings.prompts}, "
        f"{settings.answer_tokens} tokens each.",
        f"Different prompts gave {report.different_answers} different answers.",
    )


def _times(report: VllmDemoReport) -> Iterator[tuple[str, ...]]:
    tokens = report.settings.prompt_tokens
    for name, seconds, cached in (
        ("computed by engine A", report.computed_s, 0),
        ("loaded from the pool by engine B", report.loaded_s, report.loaded_tokens),
        ("cached in engine B", report.local_s, report.local_tokens),
    ):
        # Whatever is cached, the last token is computed: it gives the answer's first.
        yield name, f"{seconds * 1e3:,.0f}", f"{max(1, tokens - cached):,}"


def _places(report: VllmDemoReport) -> Iterator[tuple[str, ...]]:
    for node in report.nodes:
        yield node.node_id, f"{node.blocks:,}", format_size(node.used_bytes), format_size(node.capacity_bytes)
