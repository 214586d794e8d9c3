"""What `kvpool bench disk` measures, and its tables."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType

from kvpool.bench.disk import BLOCK_BYTES, DiskReadRow, measure_disk
from kvpool.bench.tiers import CAPACITIES, TierRow, measure_tiers
from kvpool.bench.workload import Workload
from kvpool.cli.output import table
from kvpool.core.units import format_size

DiskRows = DiskReadRow | TierRow


def disk_rows(folder: Path | None, workloads: Iterable[Workload], rounds: int) -> Iterator[DiskRows]:
    """Reads from a disk in ``folder``, if one is given; then each workload with and without a disk tier."""
    if folder is not None:
        for block_bytes in BLOCK_BYTES:
            yield from measure_disk(folder, block_bytes, rounds)
    for workload, capacity in itertools.product(workloads, CAPACITIES):
        yield measure_tiers(workload, capacity)


def disk_views(rows: Sequence[object]) -> Iterator[RenderableType | None]:
    """The tables of its rows among others."""
    yield _disk_reads(rows)
    yield _tiers(rows)


def _disk_reads(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            row.transport,
            format_size(row.block_bytes),
            f"{row.gb_per_s:.2f}",
            f"{row.limit_gb_per_s:.2f}",
            f"{row.ratio:.2f}",
        )
        for row in rows
        if isinstance(row, DiskReadRow)
    ]
    return table(("from disk over", "#block", "#GB/s", "#raw", "#ratio"), cells) if cells else None


def _tiers(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            row.what,
            f"{row.capacity:.0%}",
            f"{row.without_disk:.1%}",
            f"{row.with_disk:.1%}",
            f"{row.from_disk:.1%}",
            f"{row.written:.2f}",
        )
        for row in rows
        if isinstance(row, TierRow)
    ]
    columns = ("hit rate", "#memory", "#alone", "#with disk", "#from disk", "#disk writes a block stored")
    return table(columns, cells) if cells else None
