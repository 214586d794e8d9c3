"""The tables of `kvpool bench lookup` and `kvpool bench store`."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from kvpool.bench import lookup as lookups
from kvpool.bench import store as stores
from kvpool.bench.lookup import DirectoryMemoryRow, LookupCoreRow, LookupRow
from kvpool.bench.store import StoreRow
from kvpool.cli.output import table, target


def index_views(rows: Sequence[object]) -> Iterator[RenderableType | None]:
    """The tables of their rows among others."""
    yield _lookups(rows)
    yield _cores(rows)
    yield _memory(rows)
    yield _stores(rows)


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


def _stores(rows: Sequence[object]) -> RenderableType | None:
    cells = [
        cell
        for row in rows
        if isinstance(row, StoreRow)
        for cell in (
            (
                "index: reserve + commit, blocks/s",
                f"{row.blocks_per_s:,.0f}",
                target(stores.TARGET_BLOCKS_PER_S, ">="),
            ),
            ("2 MiB put until visible elsewhere, ms", f"{row.visible_ms:.2f}", target(stores.TARGET_VISIBLE_MS, "<=")),
            ("through a node, 4 KiB blocks/s", f"{row.end_to_end_blocks_per_s:,.0f}", target(None, "")),
        )
    ]
    return table(("store", "#measured", "#target"), cells) if cells else None
