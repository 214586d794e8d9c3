"""`kvpool bench`: measures transfers, look-ups and stores on this machine, next to the limits that it can reach."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType

from kvpool.bench import gpu as gpus
from kvpool.bench import lookup as lookups
from kvpool.bench import loss as losses
from kvpool.bench import recovery as recoveries
from kvpool.bench import replicas as replication
from kvpool.bench import store as stores
from kvpool.bench import transfer as transfers
from kvpool.bench.cipher import CipherRow, measure_cipher
from kvpool.bench.gpu import GpuSettings
from kvpool.bench.loss import LossRow
from kvpool.bench.recovery import RecoveryRow
from kvpool.bench.replicas import ReplicaRow, ReplicaSettings
from kvpool.bench.store import StoreRow, StoreSettings
from kvpool.bench.trace import read_trace
from kvpool.bench.transfer import TransferRow, TransferSettings
from kvpool.bench.vllm import VllmRows, VllmSettings, measure_vllm
from kvpool.bench.vllm_engine import require_vllm
from kvpool.bench.vllm_mooncake import missing_mooncake
from kvpool.bench.vllm_rows import MOONCAKE, PATHS
from kvpool.bench.workload import AgentSettings, Workload, agent_workload
from kvpool.cli.bench_compare import compare
from kvpool.cli.bench_disk import DiskRows, disk_rows, disk_views
from kvpool.cli.bench_gpu import gpu_views
from kvpool.cli.bench_index import index_views
from kvpool.cli.bench_lookup import LookupRows, lookup_rows
from kvpool.cli.bench_probe import probe
from kvpool.cli.bench_recovery import recovery_views
from kvpool.cli.bench_trace import trace as replay_trace
from kvpool.cli.bench_vllm import vllm_views
from kvpool.cli.output import Format, FormatOption, emit, table, target
from kvpool.cli.progress import progress
from kvpool.cli.signals import SESSION_ENDINGS, unwind_once
from kvpool.core.errors import UsageError
from kvpool.core.units import format_size, parse_size
from kvpool.ops.logging import configure
from kvpool.ops.settings import LogSettings

Row = (
    TransferRow
    | CipherRow
    | LookupRows
    | StoreRow
    | RecoveryRow
    | LossRow
    | ReplicaRow
    | DiskRows
    | VllmRows
    | gpus.Row
)

MEMORY_BLOCKS = 1_000_000
RECOVERY_BLOCKS = 1_000_000

bench = typer.Typer()
bench.command()(probe)


@bench.callback()
def _prepare() -> None:
    """Measure transfers, look-ups and stores on this machine."""
    configure(LogSettings(level="warning"))
    unwind_once(SESSION_ENDINGS)


@bench.command()
def transfer(
    *,
    transport: Annotated[str, typer.Option(help=f"One or more of {','.join(transfers.TRANSPORTS)}.")] = "shm",
    op: Annotated[str, typer.Option(help="get, put, or both.")] = "get,put",
    block_bytes: Annotated[str, typer.Option(help="Sizes of a block.")] = "64KiB,1MiB,2MiB",
    blocks: Annotated[int | None, typer.Option(help="Blocks of the working set. [default: 256 MiB of them]")] = None,
    batch: Annotated[str, typer.Option(help="Bytes that one call moves.")] = "256MiB",
    rounds: Annotated[int, typer.Option(help="Times that the working set is moved.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads that call.")] = 1,
    streams: Annotated[int, typer.Option(help="Threads or connections that one call may use.")] = 2,
    layout: Annotated[str, typer.Option(help="The caller's buffers: array, or scattered.")] = "array",
    tls: Annotated[bool, typer.Option("--tls", help="TCP with TLS too, in turns with plaintext.")] = False,
    node_size: Annotated[
        str | None, typer.Option(help="Memory of the node; with less than by default, puts evict. [default: all fits]")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Move blocks between a client and a node, every byte verified, in turns with the raw limit.

    The limit has as many threads and streams, and checks nothing: copies between two mappings of shared memory for
    shm and inproc, scatter/gather sockets for tcp and unix, NIXL's own reads for ucx. That of tls is the same pool in
    plaintext, and what AES-GCM does alone is told beside.
    """
    settings = [
        TransferSettings(
            transport=one_transport,
            op=one_op,
            block_bytes=parse_size(size),
            blocks=blocks,
            batch_bytes=parse_size(batch),
            rounds=rounds,
            threads=threads,
            streams=streams,
            layout=layout,
            node_bytes=parse_size(node_size) if node_size is not None else None,
        )
        for one_transport, one_op, size in itertools.product(
            dict.fromkeys([*_words(transport), *(["tls"] if tls else [])]), _words(op), _words(block_bytes)
        )
    ]
    _show(_transfer_rows(settings), output)


@bench.command()
def lookup(
    *,
    sizes: Annotated[str, typer.Option(help="Blocks of the chains that are looked up.")] = "1,64,512,4096,32768",
    samples: Annotated[int, typer.Option(min=1, help="Look-ups of each size.")] = 1_000,
    memory_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks of the directory whose memory is measured; 0: do not.")
    ] = MEMORY_BLOCKS,
    state: Annotated[
        str, typer.Option(help="memory; redis, started here; or the URL of one whose keys may be deleted.")
    ] = "memory",
    output: FormatOption = Format.TEXT,
) -> None:
    """Look up whole chains over the framed protocol and in the directory alone, and weigh its entries."""
    _show(lookup_rows(state, [_number(size) for size in _words(sizes)], samples, memory_blocks), output)


@bench.command()
def store(
    *,
    blocks: Annotated[int, typer.Option(help="Blocks of a round.")] = 16_384,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    samples: Annotated[int, typer.Option(help="Puts that are timed until another process sees them.")] = 100,
    output: FormatOption = Format.TEXT,
) -> None:
    """Count entries a second of the index, blocks a second through a node, and time puts until they are visible."""
    _show(_store_rows(StoreSettings(blocks=blocks, rounds=rounds, samples=samples)), output)


@bench.command()
def recovery(
    *,
    blocks: Annotated[int, typer.Option(help="Blocks that the node holds; 0: no processes.")] = RECOVERY_BLOCKS,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Replay these traces too; 1 of 16 nodes is lost half-way.")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Kill and restart the metadata service and a node, time until the pool is whole; count the hits a loss costs."""
    workloads = [agent_workload(AgentSettings()), *map(read_trace, trace or ())]
    _show(_recovery_rows(blocks, workloads), output)


@bench.command()
def vllm(
    *,
    paths: Annotated[str, typer.Option(help=f"Some of {','.join(PATHS)}.")] = ",".join(PATHS),
    rounds: Annotated[int, typer.Option(help="Prompts for each engine.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = VllmSettings().prompt_tokens,
    decode_loads: Annotated[
        int, typer.Option(help="Loads beside a running request, for its delay; 0: do not measure.")
    ] = VllmSettings().decode_loads,
    engine_cpus: Annotated[
        str | None, typer.Option(help="Processors engines compute on, e.g. 0-1. [default: all]")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Time vLLM's first token with a tiny model: prompt computed, cached, and loaded from a pool; takes minutes.

    Needs vLLM in this Python: `make setup-vllm` puts it into .venv-vllm.
    """
    settings = VllmSettings(
        paths=tuple(_words(paths)),
        rounds=rounds,
        prompt_tokens=prompt_tokens,
        decode_loads=decode_loads,
        cpus=engine_cpus,
    )
    require_vllm()
    reason = missing_mooncake() if MOONCAKE in settings.paths else None
    if reason is not None:
        typer.echo(f"{MOONCAKE} is left out: {reason}", err=True)
        settings = msgspec.structs.replace(settings, paths=tuple(path for path in settings.paths if path != MOONCAKE))
    _show(measure_vllm(settings, lambda text: typer.echo(f"{text} ...", err=True)), output)


@bench.command()
def replicas(
    *,
    clients: Annotated[int, typer.Option(help="Processes that read.")] = 2,
    blocks: Annotated[int, typer.Option(help="Blocks of the prefix.")] = 32,
    block_bytes: Annotated[str, typer.Option(help="Size of a block.")] = "1MiB",
    seconds: Annotated[float, typer.Option(min=0.1, help="Time of each measurement.")] = 5.0,
    output: FormatOption = Format.TEXT,
) -> None:
    """Read one hot prefix over tcp, with one copy of it and with two."""
    settings = ReplicaSettings(clients=clients, blocks=blocks, block_bytes=parse_size(block_bytes), seconds=seconds)
    _show(replication.measure_replicas(settings), output)


@bench.command()
def disk(
    *,
    folder: Annotated[
        Path | None, typer.Option(help="Directory on the disk to measure reads from. [default: none]")
    ] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="Replay these traces, with and without a disk tier.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds that count, of ours and of raw reads in turns.")] = 5,
    output: FormatOption = Format.TEXT,
) -> None:
    """Read blocks from a disk tier, next to raw reads; count the hits that a disk tier brings."""
    workloads = [agent_workload(AgentSettings()), *map(read_trace, trace or ())]
    _show(disk_rows(folder, workloads, rounds), output)


@bench.command()
def gpu(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each transfer is made.")] = GpuSettings().rounds,
    delay_pairs: Annotated[
        int, typer.Option(min=0, help="Samples of computing beside transfers and alone; 0: do not measure the delay.")
    ] = GpuSettings().delay_pairs,
    between: Annotated[
        gpus.Between, typer.Option(help="Between a GPU and shared memory, and the memory of another GPU or the same.")
    ] = gpus.Between.ALL,
    output: FormatOption = Format.TEXT,
) -> None:
    """Move blocks between a pool's memory and a paged cache on a GPU, every byte verified; takes a minute.

    Needs CuPy, a CUDA GPU with 24 GiB, and 20 GiB of shared memory. What moves from GPU to GPU does so between the
    second one, where there is one, and the first.
    """
    _show(gpus.measure_gpu(GpuSettings(rounds=rounds, delay_pairs=delay_pairs, between=between)), output)


bench.command(name="trace")(replay_trace)
bench.command()(compare)


@bench.command(name="all")
def all_(
    *,
    save: Annotated[
        Path | None, typer.Option(help="Write the rows to this file too, for `kvpool bench compare`.")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run every benchmark but vllm and gpu, which need more than kvpool, with its defaults; takes a few minutes."""
    saved: list[Row] = []
    products = itertools.product(transfers.transports_here(), transfers.OPS, transfers.BLOCK_BYTES)
    for rows in (
        _transfer_rows(TransferSettings(transport=t, op=op, block_bytes=size) for t, op, size in products),
        lookup_rows("memory", lookups.SIZES, 1_000, MEMORY_BLOCKS),
        _store_rows(StoreSettings()),
        _recovery_rows(RECOVERY_BLOCKS, [agent_workload(AgentSettings())]),
        replication.measure_replicas(ReplicaSettings()),
    ):
        saved += _show(rows, output)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in saved))


def _transfer_rows(settings: Iterable[TransferSettings]) -> Iterator[Row]:
    seals = False
    for one in settings:
        yield transfers.measure_transfer(one)
        seals |= one.transport == "tls"
    if seals:
        yield measure_cipher()


def _store_rows(settings: StoreSettings) -> Iterator[Row]:
    yield stores.measure_store(settings)


def _recovery_rows(blocks: int, workloads: Iterable[Workload]) -> Iterator[Row]:
    if blocks:
        yield from recoveries.measure_recovery(blocks)
    yield from map(losses.measure_loss, workloads)


def _show(rows: Iterable[Row], output: Format) -> list[Row]:
    """JSON: each row as soon as it is measured; text: one table for each kind of row. Returns the rows."""
    done: list[Row] = []
    with progress("rows measured", None, shown=output is Format.TEXT) as on_row:
        for row in rows:
            done.append(row)
            on_row()
            if output is Format.JSON:
                emit(row, output, "")
    if output is Format.TEXT:
        for view in (
            _transfers(done),
            *index_views(done),
            *recovery_views(done),
            *disk_views(done),
            *vllm_views(done),
            *gpu_views(done),
        ):
            if view is not None:
                emit(None, output, view)
    return done


def _transfers(rows: Sequence[Row]) -> RenderableType | None:
    cells = [
        (
            f"{row.transport} {row.op}",
            format_size(row.block_bytes),
            f"{row.gbps:.2f}",
            f"{row.limit_gbps:.2f}",
            f"{row.ratio:.2f}",
            target(transfers.TARGETS.get((row.transport, row.op)), ">="),
            f"{row.cpu_s_per_gb:.3f}",
            f"{row.p50_us_single:.0f}",
        )
        for row in rows
        if isinstance(row, TransferRow)
    ]
    if not cells:
        return None
    columns = ("transfer", "#block", "#GB/s", "#limit", "#ratio", "#target", "#CPU s/GB", "#single us")
    lanes = {f"{r.transport} {r.threads} x {r.streams}" for r in rows if isinstance(r, TransferRow)}
    return Group(
        table(columns, cells),
        "GB/s: every byte verified; limit: the same bytes moved raw, in turns with ours.",
        f"Threads x streams of both: {', '.join(sorted(lanes))}.",
        "single: one call for one block, from its hash to its bytes, p50.",
        *(
            f"Limit of tls: the same pool in plaintext. {row.cipher} alone, on one core: {row.gbps:.2f} GB/s."
            for row in rows
            if isinstance(row, CipherRow)
        ),
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a number; write e.g. 1,64,512")
    return int(text)
