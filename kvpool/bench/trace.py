"""Reads request traces in Mooncake's JSONL format, plain or gzip, and refuses what it cannot replay.

One request a line: ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``.
An id names one block *and all before it*. A file lists either every block, the partial tail included
(``len(hash_ids) == ceil(input_length / block)``), or full blocks only (floor); the block size is not stated.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvpool.bench.lines import raw_lines
from kvpool.bench.workload import Request, Workload
from kvpool.core.errors import UsageError
from kvpool.core.keys import NO_PARENT
from kvpool.core.limits import MATCH_BLOCKS_MAX

REQUESTS_MAX = 1_000_000
REFERENCES_MAX = 50_000_000
"""Block references of a whole trace: 8 bytes each in memory, so 400 MB."""

INPUT_TOKENS_MAX = 1 << 31
BLOCK_TOKENS_MAX = 1 << 20
BLOCK_TOKENS_STANDARD = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes tried, smallest first, when none is given."""

_ID_MAX = (1 << 63) - 1
BlockId = Annotated[int, Meta(ge=0, le=_ID_MAX)]


class TraceLine(msgspec.Struct, frozen=True):
    """One line as it is in the file; unknown fields are ignored, since published traces add their own."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1, le=INPUT_TOKENS_MAX)]
    output_length: Annotated[int, Meta(ge=0, le=INPUT_TOKENS_MAX)]
    hash_ids: Annotated[list[BlockId], Meta(max_length=MATCH_BLOCKS_MAX)]

    def fits(self, block_tokens: int) -> tuple[bool, bool]:
        """Whether the number of ids is that of all blocks (ceil), and that of full blocks only (floor)."""
        full, rest = divmod(self.input_length, block_tokens)
        ids = len(self.hash_ids)
        return ids == full + (rest > 0), ids == full


class Chains:
    """Turns ids into 32-byte chained hashes: SHA-256 over the parent's hash and the id (u64, little-endian).

    The id alone would do in a sound file; chaining makes an id under two parents two blocks, as the pool
    needs it. Equal blocks are one object, which keeps a large trace small in memory.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], bytes] = {}

    def hashes(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        """The chain of ``ids``, from its root."""
        chain: list[bytes] = []
        parent = NO_PARENT
        for block_id in ids:
            parent = self._known.get((parent, block_id)) or self._add(parent, block_id)
            chain.append(parent)
        return tuple(chain)

    def _add(self, parent: bytes, block_id: int) -> bytes:
        block_hash = hashlib.sha256(parent + block_id.to_bytes(8, "little")).digest()
        self._known[parent, block_id] = block_hash
        return block_hash


def read_trace(path: Path, block_tokens: int | None = None) -> Workload:
    """Read and check a whole trace.

    Args:
        path: The file; gzip is recognised by its content.
        block_tokens: Tokens a block covers; by default the smallest standard size that fits every line.

    Raises:
        UsageError: The file cannot be read, a line is malformed or beyond the limits, or the block size is
            wrong or cannot be told. The message names file, line and fix.
    """
    check_block_tokens(block_tokens)
    lines: list[TraceLine] = []
    references = 0
    for number, raw in raw_lines(path):
        lines.append(parse_line(raw, path.name, number))
        references += len(lines[-1].hash_ids)
        if len(lines) > REQUESTS_MAX or references > REFERENCES_MAX:
            raise UsageError(
                f"{path.name}, line {number}: more than {REQUESTS_MAX} requests or {REFERENCES_MAX} ids; "
                f"replay a part, e.g. head -n {number - 1}"
            )
    if not lines:
        raise UsageError(f"{path.name} has no requests; give a file with one JSON object a line")
    size = block_tokens or _infer_block_tokens(lines, path.name)
    _check_block_tokens(lines, size, path.name)
    chains = Chains()
    requests = (
        Request(x.input_length, chains.hashes(x.hash_ids[: x.input_length // size]), x.timestamp / 1_000) for x in lines
    )
    return Workload(path.name, size, tuple(requests))


def check_block_tokens(block_tokens: int | None) -> None:
    """Refuse a block size that none can be; raises UsageError."""
    if block_tokens is not None and not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise UsageError(f"block tokens are {block_tokens}; they must be from 1 to {BLOCK_TOKENS_MAX}")


def parse_line(raw: bytes, file: str, number: int) -> TraceLine:
    """One line.

    Raises:
        UsageError: Not a JSON object with the four fields in their ranges; names file and line.
    """
    try:
        return msgspec.json.decode(raw, type=TraceLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{file}, line {number}: {error}; expected "
            '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}: '
            "correct or delete the line, or fetch the file again if it was cut off"
        ) from error


def _infer_block_tokens(lines: Sequence[TraceLine], file: str) -> int:
    misfits = {size: _first_misfit(lines, size) for size in BLOCK_TOKENS_STANDARD}
    for size, misfit in misfits.items():
        if misfit is None:
            return size
    # The size that holds longest is most likely the file's own, and the line that breaks it the faulty one.
    likely = max(misfits, key=lambda size: misfits[size] or 0)
    raise _misfit_error(lines, misfits[likely] or 0, likely, file)


def _check_block_tokens(lines: Sequence[TraceLine], size: int, file: str) -> None:
    misfit = _first_misfit(lines, size)
    if misfit is not None:
        raise _misfit_error(lines, misfit, size, file)


def _misfit_error(lines: Sequence[TraceLine], index: int, size: int, file: str) -> UsageError:
    line = lines[index]
    return UsageError(
        f"{file}, line {index + 1}: {len(line.hash_ids)} ids for {line.input_length} tokens do not fit "
        f"{size} tokens a block ({line.input_length / size:.2f} blocks); correct the line, or give the "
        "file's own block size with --block-tokens"
    )


def _first_misfit(lines: Sequence[TraceLine], size: int) -> int | None:
    """Index of the first line that rules ``size`` out; None if all lines keep one rule, ceil or floor."""
    ceil = floor = True
    for i, line in enumerate(lines):
        fits_ceil, fits_floor = line.fits(size)
        ceil, floor = ceil and fits_ceil, floor and fits_floor
        if not (ceil or floor):
            return i
    return None
