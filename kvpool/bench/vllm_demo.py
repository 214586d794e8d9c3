"""The vLLM demo: what one engine has computed another one loads from the pool, and both answer the same."""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

import kvpool
from kvpool.bench.demo import NODE_BYTES_MIN, NODES_MAX, NodeUse, pool_of
from kvpool.bench.measure import at_least, rounded
from kvpool.bench.vllm import await_landed, blocks_held, engine_options, kvpool_transfer
from kvpool.bench.vllm_engine import EngineProcess, require_vllm
from kvpool.bench.vllm_messages import Generated
from kvpool.bench.vllm_model import BLOCK_TOKENS, DEMO_MODEL, PROMPT_TOKENS, prompt_of, write_model, write_weights
from kvpool.core.errors import KvpoolError, UsageError

_TOKENS_MAX = DEMO_MODEL.positions - 1_024
_ANSWER_TOKENS_MAX = 256


class VllmDemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to show.

    Attributes:
        prompts: Prompts that both engines answer; two more warm them up.
        prompt_tokens: Tokens of a prompt.
        answer_tokens: Tokens of an answer.
        nodes: Store nodes, one process each.
        transports: Transports the engines may use, best first.
    """

    prompts: int = 3
    prompt_tokens: int = PROMPT_TOKENS
    answer_tokens: int = 8
    nodes: int = 2
    transports: tuple[str, ...] = ("shm", "tcp")

    def __post_init__(self) -> None:
        at_least("prompts", self.prompts)
        at_least("answer tokens", self.answer_tokens)
        at_least("prompt tokens", self.prompt_tokens, 2 * BLOCK_TOKENS)
        if self.prompt_tokens > _TOKENS_MAX or self.answer_tokens > _ANSWER_TOKENS_MAX:
            raise UsageError(f"the model takes prompts of {_TOKENS_MAX} tokens, and answers {_ANSWER_TOKENS_MAX}")
        if not 1 <= self.nodes <= NODES_MAX:
            raise UsageError(f"nodes are {self.nodes}; they must be from 1 to {NODES_MAX}")

    @property
    def node_bytes(self) -> int:
        """Memory of each node: one could hold everything, since chains need not spread evenly."""
        tokens = self.prompt_tokens + self.answer_tokens + BLOCK_TOKENS
        return max(NODE_BYTES_MIN, (self.prompts + 2) * tokens * DEMO_MODEL.kv_bytes_per_token)


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt: computed by one engine, loaded by the other, and answered again by that one."""

    computed: Generated
    loaded: Generated
    local: Generated

    @property
    def identical(self) -> bool:
        """Whether all three are the same tokens."""
        return self.computed.tokens == self.loaded.tokens == self.local.tokens


class VllmDemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured; times are medians over the prompts.

    Attributes:
        vllm: Its version.
        computed_s: Time to first token of the engine that computed.
        loaded_s: The same of the other one, which loaded from the pool.
        local_s: The same of that one again, from its own cache.
        loaded_tokens: Tokens of a prompt that came from the pool, least of all prompts.
        local_tokens: Tokens of a prompt that the engine still had, least of all prompts.
        identical: Prompts whose three answers are the same tokens.
        different_answers: Answers that differ from each other: they depend on the prompt.
    """

    vllm: str
    settings: VllmDemoSettings
    computed_s: float
    loaded_s: float
    local_s: float
    loaded_tokens: int
    local_tokens: int
    identical: int
    different_answers: int
    nodes: tuple[NodeUse, ...]


def run_vllm_demo(settings: VllmDemoSettings, say: Callable[[str], None] = lambda _text: None) -> VllmDemoReport:
    """Start a pool and two engines, let both answer the same prompts, stop everything.

    Args:
        settings: What to show.
        say: Told what is going on, for people who wait.

    Raises:
        UsageError: No vLLM here; nothing was started.
        KvpoolError: Something did not start, or nothing came from the pool.
    """
    require_vllm()
    with contextlib.ExitStack() as stack:
        uri = stack.enter_context(pool_of(settings.nodes, settings.node_bytes))
        pool = stack.enter_context(kvpool.connect(uri))
        say("starting two engines")
        first, second = stack.enter_context(_engines(uri, settings))
        version = first.ready().version
        second.ready()
        say("warming up")
        for number, engine in enumerate((first, second)):
            _saved(engine, _prompt(settings, number), settings, pool)
        answers = []
        for i in range(settings.prompts):
            say(f"prompt {i + 1} of {settings.prompts}")
            prompt = _prompt(settings, 2 + i)
            computed = _saved(first, prompt, settings, pool)
            loaded, local = (second.generate(prompt, settings.answer_tokens) for _ in range(2))
            answers.append(Answers(computed=computed, loaded=loaded, local=local))
        nodes = tuple(NodeUse(n.node_id, n.blocks, n.used_bytes, n.capacity_bytes) for n in pool.status().nodes)
    return report_of(version, settings, answers, nodes)


def report_of(
    version: str, settings: VllmDemoSettings, answers: Sequence[Answers], nodes: tuple[NodeUse, ...]
) -> VllmDemoReport:
    """The report; raises KvpoolError when a prompt was not loaded: its time would be no time of a load."""
    loaded_tokens = min(each.loaded.cached_tokens for each in answers)
    if not loaded_tokens:
        raise KvpoolError("an engine computed a prompt that the pool had")
    return VllmDemoReport(
        vllm=version,
        settings=settings,
        computed_s=rounded(statistics.median(each.computed.ttft_s for each in answers)),
        loaded_s=rounded(statistics.median(each.loaded.ttft_s for each in answers)),
        local_s=rounded(statistics.median(each.local.ttft_s for each in answers)),
        loaded_tokens=loaded_tokens,
        local_tokens=min(each.local.cached_tokens for each in answers),
        identical=sum(each.identical for each in answers),
        different_answers=len({tuple(each.computed.tokens) for each in answers}),
        nodes=nodes,
    )


@contextlib.contextmanager
def _engines(uri: str, settings: VllmDemoSettings) -> Iterator[list[EngineProcess]]:
    """Two engines, started together and stopped together."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-demo-")))
        model = write_model(folder / "model", DEMO_MODEL)
        write_weights(model, DEMO_MODEL)
        more = {"kv_transfer_config": kvpool_transfer(uri, settings.transports)}
        options = engine_options(model, DEMO_MODEL, settings.prompt_tokens, more)
        engines = [stack.enter_context(EngineProcess(name, options, folder / f"{name}.log")) for name in ("A", "B")]
        try:
            yield engines
        finally:
            for engine in engines:
                engine.quit()


def _saved(engine: EngineProcess, prompt: list[int], settings: VllmDemoSettings, pool: kvpool.Client) -> Generated:
    """The answer to a new prompt, once the pool has the prompt's blocks."""
    before = blocks_held(pool)
    answer = engine.generate(prompt, settings.answer_tokens)
    await_landed(lambda: blocks_held(pool), before + len(prompt) // BLOCK_TOKENS)
    return answer


def _prompt(settings: VllmDemoSettings, number: int) -> list[int]:
    return prompt_of(number, settings.prompt_tokens, DEMO_MODEL.vocabulary)
