"""Compares two runs of `kvpool bench`, and finds what fell.

What is compared by default does not depend on the machine's speed of the day: ratios to a limit that was measured in
the same run, hit rates, bytes a block. Times and rates are compared only when both runs are of one quiet machine.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvpool.core.errors import UsageError

FILE_BYTES_MAX = 64 << 20

UP, DOWN = 1, -1
"""Which way a measure is better."""


class Measures(msgspec.Struct, frozen=True):
    """What rows of one kind are compared by.

    Attributes:
        names: Fields that say what was measured: rows of two runs are the same where these are.
        steady: Fields to compare, and which way is better.
        timed: Those that depend on the machine's speed.
    """

    names: tuple[str, ...]
    steady: dict[str, int]
    timed: dict[str, int] = {}


MEASURES: dict[str, Measures] = {
    "transfer": Measures(
        ("transport", "op", "block_bytes", "layout", "threads", "streams", "evicting"),
        {"ratio": UP},
        {"gbps": UP, "cpu_s_per_gb": DOWN, "p50_us_single": DOWN},
    ),
    "lookup": Measures(("size", "via"), {}, {"p50_ms": DOWN}),
    "lookup_core": Measures(("size",), {}, {"p50_us": DOWN}),
    "directory_memory": Measures(("blocks",), {"bytes_per_block": DOWN, "bytes_per_copy": DOWN}),
    "store": Measures((), {}, {"blocks_per_s": UP, "visible_ms": DOWN, "end_to_end_blocks_per_s": UP}),
    "recovery": Measures(("what", "blocks"), {}, {"seconds": DOWN}),
    "recovery_hits": Measures(("what", "nodes"), {"hit_rate": UP, "at_once": UP, "later": UP}),
    "replicas": Measures(("copies", "clients"), {}, {"gb_per_s": UP}),
    "disk_read": Measures(("transport", "block_bytes"), {"ratio": UP}),
    "trace": Measures(("workload", "settings"), {"hit_rate": UP}, {"cpu_s_per_gb": DOWN}),
    "vllm": Measures(("path", "prompt_tokens"), {"of_mooncake": DOWN}, {"ttft_p50_s": DOWN}),
    "vllm_saving": Measures(("path",), {"of_none": DOWN}),
    "vllm_decode": Measures(("path",), {"ratio": DOWN}),
    "gpu": Measures(("what",), {"ratio": UP}, {"gbps": UP}),
    "gpu_peer": Measures(("what",), {"ratio": UP}, {"gbps": UP}),
    "gpu_delay": Measures(("what",), {}, {"percent": DOWN}),
}
"""By the rows' ``bench``; rows of other kinds are not compared."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One measure in both runs.

    Attributes:
        bench: Kind of the row.
        what: What was measured.
        measure: Name of the field.
        before: Its value then.
        after: Its value now; None where the row is missing, which counts as fallen.
        fell: Whether it is worse by more than the tolerance.
    """

    bench: str
    what: str
    measure: str
    before: float
    after: float | None
    fell: bool


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run, one JSON object a line.

    Raises:
        UsageError: The file cannot be read, is too long, or a line is no row; names file and line.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(
                f"{path} has more than {FILE_BYTES_MAX} bytes; give what `kvpool bench --format json` wrote"
            )
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error}; give a file written by `kvpool bench --format json`"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {error}; expected one JSON object a line") from error
        if not isinstance(row.get("bench"), str):
            raise UsageError(f"{path}, line {number} is no row of `kvpool bench`: it has no 'bench'")
        rows.append(row)
    return rows


def compare_rows(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], tolerance: float, *, timed: bool = False
) -> Iterator[Change]:
    """Each measure of each row of ``before`` that can be compared.

    Args:
        before: Rows of the earlier run.
        after: Rows of the later one.
        tolerance: A measure that is worse by more than this part of its earlier value has fallen.
        timed: Whether times and rates are compared too.
    """
    now = {_name(row): row for row in after if row["bench"] in MEASURES}
    for row in before:
        measures = MEASURES.get(row["bench"])
        if measures is None:
            continue
        there = now.get(_name(row))
        for measure, better in (measures.steady | (measures.timed if timed else {})).items():
            old, new = _number(row.get(measure)), _number((there or {}).get(measure))
            if old is None:
                continue
            yield Change(
                bench=row["bench"],
                what=_what(row),
                measure=measure,
                before=old,
                after=new,
                fell=new is None or (old - new) * better > tolerance * abs(old),
            )


def _name(row: dict[str, Any]) -> bytes:
    """What was measured, as one key."""
    names = MEASURES[row["bench"]].names
    return msgspec.json.encode([row["bench"], *(row.get(name) for name in names)], order="sorted")


def _what(row: dict[str, Any]) -> str:
    values = (row.get(name) for name in MEASURES[row["bench"]].names)
    return " ".join(str(value) for value in values if value is not None and not isinstance(value, dict))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
