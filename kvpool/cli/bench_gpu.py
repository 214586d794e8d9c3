"""The tables of `kvpool bench gpu`."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from kvpool.bench.gpu import GpuRow
from kvpool.bench.gpu_blocks import GpuNoteRow
from kvpool.bench.gpu_delay import GpuDelayRow
from kvpool.bench.gpu_peer import GpuPeerRow
from kvpool.cli.output import table, target


def gpu_views(rows: Sequence[object]) -> Iterator[RenderableType]:
    """A table of transfers between GPUs, one of those with host memory, one of what they cost, as far as measured."""
    peers = [
        (
            row.what,
            f"{row.gbps:.0f}",
            f"{row.limit_gbps:.0f}",
            f"{row.ratio:.2f}",
            f"{row.moved_gbps:.0f}",
            target(row.target_gbps, ">="),
        )
        for row in rows
        if isinstance(row, GpuPeerRow)
    ]
    if peers:
        yield Group(
            table(("GPU to GPU", "#GB/s", "#limit", "#ratio", "#moved", "#target"), peers),
            "GB/s: from the call to verified bytes; limit: one plain copy between the two GPUs, in turns with ours.",
            "moved: GB/s of the transfer alone. What was loaded was compared with what was saved, whole.",
        )
    transfers = [
        (
            row.what,
            f"{row.gbps:.1f}",
            f"{row.limit_gbps:.1f}",
            f"{row.ratio:.2f}",
            target(row.target, ">="),
            f"{row.moved:.2f}",
        )
        for row in rows
        if isinstance(row, GpuRow)
    ]
    if transfers:
        yield Group(
            table(("256 blocks of 2 MiB, GPU", "#GB/s", "#limit", "#ratio", "#target", "#moved"), transfers),
            "GB/s: from the call to verified bytes; limit: one plain page-locked copy, in turns with ours.",
            "moved: the ratio of the transfer alone, without look-up, preparing and commit.",
            "What was loaded was compared with what was saved, whole.",
        )
    delays = [
        (row.what, f"{row.percent:.1f} ± {row.error_percent:.1f}", target(row.target, "<"), f"{row.gbps:.1f}")
        for row in rows
        if isinstance(row, GpuDelayRow)
    ]
    if delays:
        yield table(("matrix products beside", "#slower by %", "#target", "#GB/s meanwhile"), delays)
    notes = [(row.what, f"{row.value:.3g} {row.unit}") for row in rows if isinstance(row, GpuNoteRow)]
    if notes:
        yield table(("beside that", "#measured"), notes)
