"""Tells the formats of traces apart, by their first line."""

from pathlib import Path
from typing import Any

import msgspec

from kvpool.bench.lines import raw_lines
from kvpool.bench.sessions import read_sessions
from kvpool.bench.trace import read_trace
from kvpool.bench.workload import Workload
from kvpool.core.errors import UsageError


def read_workload(path: Path, block_tokens: int | None = None, tokenizer: Path | None = None) -> Workload:
    """Read a trace in whatever format it is: Mooncake's JSONL, or sessions of text.

    Args:
        path: The file, plain or gzip.
        block_tokens: Tokens a block covers; by default the trace's own, 16 for text.
        tokenizer: A ``tokenizer.json``; sessions of text need it.

    Raises:
        UsageError: The file cannot be read or has no requests, or a line is malformed; names file, line and fix.
    """
    if not _is_sessions(path):
        return read_trace(path, block_tokens)
    if tokenizer is None:
        raise UsageError(f"{path.name} has sessions of text; say how to cut them: --tokenizer tokenizer.json")
    return read_sessions(path, tokenizer, block_tokens)


def _is_sessions(path: Path) -> bool:
    """Whether the first line is one of sessions; what is no JSON at all is for the readers to refuse."""
    for _, raw in raw_lines(path):
        try:
            return "add" in msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
    return False
