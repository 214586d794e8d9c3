"""What an engine process is told and answers: one JSON object a line, each with the name of its type."""

from typing import Any

import msgspec

from kvpool.core.errors import ProtocolError


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: build the engine. ``options`` are those of `vllm.LLM`."""

    options: dict[str, Any]


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Answer one prompt of token ids with ``max_tokens`` tokens, greedily."""

    prompt: list[int]
    max_tokens: int = 1


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Answer ``prompt`` with ``max_tokens`` tokens, and begin one of ``beside`` every ``every`` tokens."""

    prompt: list[int]
    max_tokens: int
    beside: list[list[int]]
    every: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget what the engine itself has cached; the pool keeps what it has."""


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """End."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is built."""

    version: str


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag="generated"):
    """The answer to a prompt.

    Attributes:
        ttft_s: From the request to its first token.
        elapsed_s: From the request to its last.
        tokens: The answer.
        cached_tokens: Of the prompt, those that were not computed: cached in the engine or loaded.
    """

    ttft_s: float
    elapsed_s: float
    tokens: list[int]
    cached_tokens: int


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """Times of a request's tokens while others came and went, all on one clock.

    Attributes:
        token_s: When each token of the running request arrived.
        spans_s: For each request beside it: when it was begun, and when its first token arrived.
        cached_tokens: Of the prompts beside it, those that were not computed.
    """

    token_s: list[float]
    spans_s: list[tuple[float, float]]
    cached_tokens: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Whether what was asked for happened."""

    ok: bool


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine raised; the log has the trace."""

    message: str


Command = Start | Generate | Decode | ResetPrefixCache | Quit
Reply = Ready | Generated | Decoded | Done | Failed

_encoder = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(Command)
_replies = msgspec.json.Decoder(Reply)


def to_line(message: Command | Reply) -> bytes:
    """The message as it is sent, newline included."""
    return _encoder.encode(message) + b"\n"


def command_of(line: bytes) -> Command:
    """The command in a line; raises ProtocolError."""
    try:
        return _commands.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{line[:200]!r} is no command: {error}") from None


def reply_of(line: bytes) -> Reply:
    """The reply in a line; raises ProtocolError."""
    try:
        return _replies.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{line[:200]!r} is no reply: {error}") from None
