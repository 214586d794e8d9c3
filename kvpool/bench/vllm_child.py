"""The engine process itself: builds one `vllm.LLM` and serves commands from stdin, a line each.

Requests are added and stepped one by one rather than with `LLM.generate`, since only so does each token have a time.
"""

import importlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from kvpool.bench.vllm_messages import (
    Command,
    Decode,
    Decoded,
    Done,
    Failed,
    Generate,
    Generated,
    Quit,
    Ready,
    Reply,
    ResetPrefixCache,
    Start,
    command_of,
    to_line,
)
from kvpool.core.errors import ProtocolError


@dataclass
class Progress:
    """How far a request is: when it was begun and when each of its tokens arrived."""

    began_s: float
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    def take(self, tokens: Sequence[int], cached_tokens: int, now_s: float) -> None:
        """Note an output: ``tokens`` are all so far, and what is new of them has just arrived."""
        self.token_s += [now_s] * (len(tokens) - len(self.tokens))
        self.tokens = list(tokens)
        self.cached_tokens = cached_tokens


class Engine:
    """One `vllm.LLM` whose requests are timed; not thread-safe."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._vllm = importlib.import_module("vllm")
        self._llm = self._vllm.LLM(**options)
        self._numbers = itertools.count()
        self._running: dict[str, Progress] = {}

    @property
    def version(self) -> str:
        """Of vLLM."""
        return str(self._vllm.__version__)

    def answer(self, command: Command) -> Reply:
        """Do what a command says."""
        match command:
            case Generate():
                return self._generate(command)
            case Decode():
                return self._decode(command)
            case ResetPrefixCache():
                return Done(bool(self._llm.reset_prefix_cache(reset_connector=False)))
            case _:
                raise ProtocolError(f"{type(command).__name__} is not expected here")

    def _generate(self, command: Generate) -> Generated:
        progress = self._begin(command.prompt, command.max_tokens)
        self._finish()
        return Generated(
            ttft_s=progress.token_s[0] - progress.began_s,
            elapsed_s=progress.token_s[-1] - progress.began_s,
            tokens=progress.tokens,
            cached_tokens=progress.cached_tokens,
        )

    def _decode(self, command: Decode) -> Decoded:
        running = self._begin(command.prompt, command.max_tokens)
        beside: list[Progress] = []
        while self._llm.llm_engine.has_unfinished_requests():
            self._step()
            if len(beside) < len(command.beside) and len(running.tokens) >= (len(beside) + 1) * command.every:
                beside.append(self._begin(command.beside[len(beside)], 1))
        self._running.clear()
        return Decoded(
            token_s=running.token_s,
            spans_s=[(each.began_s, each.token_s[0]) for each in beside],
            cached_tokens=sum(each.cached_tokens for each in beside),
        )

    def _begin(self, prompt: list[int], max_tokens: int) -> Progress:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        name = str(next(self._numbers))
        self._running[name] = Progress(time.perf_counter())
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return self._running[name]

    def _step(self) -> None:
        outputs = self._llm.llm_engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            progress = self._running[output.request_id]
            progress.take(output.outputs[0].token_ids, output.num_cached_tokens or 0, now_s)

    def _finish(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._step()
        self._running.clear()


def serve() -> None:
    """Serve until told to quit, or until stdin ends, which is when the parent does."""
    with _take_stdout() as replies:

        def reply(message: Reply) -> None:
            replies.write(to_line(message))
            replies.flush()

        engine: Engine | None = None
        for line in sys.stdin.buffer:
            try:
                command = command_of(line)
                match command:
                    case Quit():
                        return
                    case Start(options):
                        engine = Engine(options)
                        reply(Ready(engine.version))
                    case _ if engine is None:
                        raise ProtocolError("the first command must be to start")
                    case _:
                        reply(engine.answer(command))
            except Exception as error:  # noqa: BLE001 - whatever vLLM raises, the parent must know
                traceback.print_exc()
                reply(Failed(f"{type(error).__name__}: {error}"))


def _take_stdout() -> IO[bytes]:
    """Stdout for replies alone: whatever else prints, in this process or those that it starts, goes to stderr."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies
