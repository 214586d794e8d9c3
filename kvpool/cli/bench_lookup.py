"""What `kvpool bench lookup` measures, and its tables."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from kvpool.bench import lookup as lookups
from kvpool.bench.lookup import DirectoryMemoryRow, LookupCoreRow, LookupRow
from kvpool.bench.lookup_rows import (
    SHARED_TARGET_BYTES,
    SHARED_TARGETS_MS,
    SharedLookupRow,
    SharedMemoryRow,
    SharedRateRow,
)
from kvpool.cli.output import table, target

LookupRows = LookupRow | LookupCoreRow | DirectoryMemoryRow | SharedLookupRow | SharedRateRow | SharedMemoryRow


def lookup_rows(state: str, sizes: Sequence[int], samples: int, memory_blocks: int) -> Iterator[LookupRows]:
    """Look-ups where a service holds its state itself (``memory``), or where services share it."""
    if state != "memory":
        from kvpool.bench.lookup_shared import measure_shared  # noqa: PLC0415 - needs an extra

        yield from measure_shared(state, sizes, samples, memory_blocks)
        return
    yield from lookups.measure_lookup(sizes, samples)
    yield from lookups.measure_lookup_core(sizes, samples)
    if memory_blocks:
        yield lookups.measure_directory_memory(memory_blocks)


def lookup_views(rows: Sequence[object]) -> Iterator[RenderableType | None]:
    """The tables of its rows among others."""
    yield _lookups(rows)
    yield _cores(rows)
    yield _memory(rows)
    yield _shared(rows)
    yield _rates(rows)
    yield _shared_memory(rows)


def _lookups(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            f"{row.size:,}",
            row.via,
            f"{row.p50_ms:.3f}",
            target(lookups.TARGETS_MS.get(row.size), "<="),
            f"{row.p99_ms:.3f}",
            f"{row.keys_per_s:,.0f}",
        )
        for row in rows
        if isinstance(row, LookupRow)
    ]
    return table(("#look-up of blocks", "via", "#p50 ms", "#target", "#p99 ms", "#keys/s"), cells) if cells else None


def _cores(rows: Sequence[object]) -> RenderableType | None:
    cells = [(f"{row.size:,}", f"{row.p50_us:.1f}") for row in rows if isinstance(row, LookupCoreRow)]
    return table(("#directory alone, blocks", "#p50 us"), cells) if cells else None


def _memory(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            f"{row.blocks:,}",
            f"{row.bytes_per_block:.0f}",
            target(lookups.TARGET_BYTES_PER_BLOCK, "<="),
            f"{row.bytes_per_copy:.0f}",
            target(lookups.TARGET_BYTES_PER_COPY, "<="),
        )
        for row in rows
        if isinstance(row, DirectoryMemoryRow)
    ]
    columns = ("#directory of blocks", "#bytes a block", "#target", "#bytes a further copy", "#target")
    return table(columns, cells) if cells else None


def _shared(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            f"{row.size:,}",
            row.via,
            f"{row.p50_ms:.3f}",
            target(SHARED_TARGETS_MS.get(row.size), "<="),
            f"{row.p99_ms:.3f}",
        )
        for row in rows
        if isinstance(row, SharedLookupRow)
    ]
    return table(("#in Redis, look-up of blocks", "via", "#p50 ms", "#target", "#p99 ms"), cells) if cells else None


def _rates(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (
            row.services,
            row.clients,
            f"{row.lookups_per_s:,.0f}",
            f"{row.redis_cores:.2f}",
            f"{row.service_cores:.2f}",
        )
        for row in rows
        if isinstance(row, SharedRateRow)
    ]
    columns = ("#services", "#clients", "#look-ups/s", "#cores of Redis", "#of the services")
    return table(columns, cells) if cells else None


def _shared_memory(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        (f"{row.blocks:,}", f"{row.bytes_per_block:.0f}", target(SHARED_TARGET_BYTES, "<="))
        for row in rows
        if isinstance(row, SharedMemoryRow)
    ]
    return table(("#in Redis, blocks", "#bytes a block", "#target"), cells) if cells else None
