"""Reads recorded calls of a model as text, a session's turns one after the other, and cuts them into blocks.

One call a line: ``{"s": session, "n": call, "t": seconds or null, "keep": chars, "add": text}``; the prompt of a call
is the first ``keep`` characters of the session's last one, and ``add``.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from kvpool.bench.lines import raw_lines
from kvpool.bench.trace import REFERENCES_MAX, REQUESTS_MAX, check_block_tokens
from kvpool.bench.workload import Request, Workload
from kvpool.core.errors import UsageError
from kvpool.core.keys import chain_hashes
from kvpool.core.limits import MATCH_BLOCKS_MAX

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK_TOKENS = 16
"""vLLM's own block size."""

PROMPT_CHARS_MAX = 64 << 20


class SessionLine(msgspec.Struct, frozen=True):
    """One line as it is in the file; unknown fields are ignored."""

    s: str
    n: Annotated[int, Meta(ge=0)]
    t: Annotated[float, Meta(ge=0)] | None
    keep: Annotated[int, Meta(ge=0, le=PROMPT_CHARS_MAX)]
    add: str


def read_sessions(path: Path, tokenizer: Path, block_tokens: int | None = None) -> Workload:
    """Read and check a whole file of sessions.

    Args:
        path: The file; gzip is recognised by its content.
        tokenizer: A ``tokenizer.json`` as Hugging Face models come with.
        block_tokens: Tokens a block covers; by default 16.

    Raises:
        UsageError: A file cannot be read, the package tokenizers is missing, or a line is malformed, out of order or
            beyond the limits. The message names file, line and fix.
    """
    check_block_tokens(block_tokens)
    size = block_tokens or BLOCK_TOKENS
    encoder = _tokenizer(tokenizer)
    last: dict[str, tuple[int, str]] = {}
    known: dict[bytes, bytes] = {}  # equal blocks are one object, which keeps a large file small in memory
    requests: list[Request] = []
    references = 0
    for number, raw in raw_lines(path):
        line = parse_session_line(raw, path.name, number)
        prompt = _prompt(line, last, path.name, number)
        last[line.s] = line.n, prompt
        tokens = encoder.encode(prompt, add_special_tokens=False).ids
        hashes = tuple(known.setdefault(block, block) for block in chain_hashes(tokens, size))
        references += len(hashes)
        if len(requests) == REQUESTS_MAX or references > REFERENCES_MAX or len(hashes) > MATCH_BLOCKS_MAX:
            raise UsageError(
                f"{path.name}, line {number}: more than {REQUESTS_MAX} requests, {REFERENCES_MAX} blocks in all or "
                f"{MATCH_BLOCKS_MAX} in one; replay a part, e.g. head -n {number - 1}"
            )
        if tokens:
            requests.append(Request(len(tokens), hashes, line.t))
    if not requests:
        raise UsageError(f"{path.name} has no prompts; give a file with one JSON object a line")
    if any(request.arrival_s is None for request in requests):
        requests = [msgspec.structs.replace(request, arrival_s=None) for request in requests]
    return Workload(path.name, size, tuple(requests))


def parse_session_line(raw: bytes, file: str, number: int) -> SessionLine:
    """One line; raises UsageError that names file and line."""
    try:
        return msgspec.json.decode(raw, type=SessionLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f'{file}, line {number}: {error}; expected {{"s": session, "n": call, "t": seconds or null, "keep": chars, '
            '"add": text}: correct or delete the line, or fetch the file again if it was cut off'
        ) from error


def _prompt(line: SessionLine, last: dict[str, tuple[int, str]], file: str, number: int) -> str:
    call, before = last.get(line.s, (-1, ""))
    if line.n <= call:
        raise UsageError(f"{file}, line {number}: call {line.n} of session {line.s!r} comes after {call}; sort them")
    if line.keep > len(before):
        raise UsageError(
            f"{file}, line {number}: keeps {line.keep} characters of a prompt of {len(before)}; a line is missing"
        )
    prompt = before[: line.keep] + line.add
    if len(prompt) > PROMPT_CHARS_MAX:
        raise UsageError(
            f"{file}, line {number}: {len(prompt)} characters in a prompt; the limit is {PROMPT_CHARS_MAX}"
        )
    return prompt


def _tokenizer(path: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only here, and nothing else needs it
    except ImportError as error:
        raise UsageError("sessions of text need a tokenizer; install it: pip install 'kvpool[text]'") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise UsageError(f"tokenizer {str(path)!r} cannot be read: {error}; give a model's tokenizer.json") from error
