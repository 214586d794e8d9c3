"""The tables of `kvpool bench lookup` and `kvpool bench store`."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from kvpool.bench import store as stores
from kvpool.bench.store import StoreRow
from kvpool.cli.bench_lookup import lookup_views
from kvpool.cli.output import table, target


def index_views(rows: Sequence[object]) -> Iterator[RenderableType | None]:
    """The tables of their rows among others."""
    yield from lookup_views(rows)
    yield _stores(rows)


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
