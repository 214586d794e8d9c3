"""vLLM on this machine's processors: time to first token of a prompt computed, cached, and loaded from a pool.

All engines are up at once and take their turns prompt by prompt, so that what is compared is measured in the same
minutes; an idle engine uses no processor. Every engine gets prompts of its own, computes and saves one, and answers it
again once its blocks have landed and its own cache has been reset.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import kvpool
from kvpool.bench.measure import at_least, elapsed_s, pool_processes
from kvpool.bench.vllm_engine import EngineProcess, bound_to, require_vllm
from kvpool.bench.vllm_messages import Decode, Decoded, Generated
from kvpool.bench.vllm_model import BENCH_MODEL, BLOCK_TOKENS, PROMPT_TOKENS, ModelShape, prompt_of, write_model
from kvpool.bench.vllm_mooncake import KV_TRANSFER, mooncake_store
from kvpool.bench.vllm_rows import (
    LOCAL,
    MOONCAKE,
    NONE,
    PATHS,
    SHM,
    TCP,
    Sample,
    VllmDecodeRow,
    VllmRow,
    VllmSavingRow,
    decode_row,
    saving_rows,
    ttft_rows,
)
from kvpool.bench.waiting import wait_until
from kvpool.core.errors import DeadlineError, KvpoolError, UsageError
from kvpool.core.limits import PAGE_BYTES

VllmRows = VllmRow | VllmSavingRow | VllmDecodeRow

LAND_S = 30.0
"""How long a save may take to land, and an engine's own cache to be free for a reset."""

DECODE_TOKENS_BETWEEN = 25
DECODE_PROMPT_TOKENS = 64
DECODE_RUNS = 5

_ENGINE_CACHE_BYTES = 1 << 30
_ROOM_TOKENS = 512
"""What a context may have beyond the prompt."""

_TRANSPORTS = {SHM: "shm", TCP: "tcp"}


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        paths: Some of `PATHS`; `none` and `local` come from one engine.
        rounds: Prompts for each engine; one more warms up.
        prompt_tokens: Tokens of a prompt.
        decode_loads: Requests that load beside a running one, in each of `DECODE_RUNS` runs; 0: do not measure.
        cpus: Processors that engines compute on, as vLLM writes them; by default all.
    """

    paths: tuple[str, ...] = PATHS
    rounds: int = 5
    prompt_tokens: int = PROMPT_TOKENS
    decode_loads: int = 6
    cpus: str | None = None

    def __post_init__(self) -> None:
        for path in self.paths:
            if path not in PATHS:
                raise UsageError(f"path {path!r} is not known; use some of {', '.join(PATHS)}")
        at_least("rounds", self.rounds)
        at_least("decode loads", self.decode_loads, 0)
        at_least("prompt tokens", self.prompt_tokens, 2 * BLOCK_TOKENS)
        most = BENCH_MODEL.positions - _ROOM_TOKENS
        if self.prompt_tokens > most:
            raise UsageError(f"prompt tokens are {self.prompt_tokens}; the model takes {most} at most")

    @property
    def engines(self) -> tuple[str, ...]:
        """The paths that have an engine of their own."""
        wanted = {LOCAL if path == NONE else path for path in self.paths}
        return tuple(path for path in PATHS if path in wanted)

    @property
    def saved_bytes(self) -> int:
        """Bytes that one engine saves in all rounds, decoding included."""
        prompts = self.rounds + 1 + self.decode_loads
        return prompts * (self.prompt_tokens + BLOCK_TOKENS) * BENCH_MODEL.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Target:
    """An engine, and how many blocks the pool that it saves to holds; None without a pool."""

    path: str
    engine: EngineProcess
    held: Callable[[], int] | None


def measure_vllm(settings: VllmSettings, say: Callable[[str], None] = lambda _text: None) -> Iterator[VllmRows]:
    """Start everything, measure, stop everything.

    Args:
        settings: What to measure.
        say: Told what is going on, for people who wait.

    Raises:
        UsageError: No vLLM here; nothing was started.
        KvpoolError: Something did not start, or did not save or load what it should have.
    """
    require_vllm()
    with _targets(settings, say) as targets:
        samples: dict[str, list[Sample]] = {target.path: [] for target in targets}
        for i in range(settings.rounds + 1):
            say(f"round {i} of {settings.rounds}" if i else "warming up")
            for target in targets[i % len(targets) :] + targets[: i % len(targets)]:
                sample = _sample(target, _prompt(settings, target.path, i))
                if i:
                    samples[target.path].append(sample)
        yield from (row for row in ttft_rows(samples, settings.prompt_tokens) if row.path in settings.paths)
        yield from saving_rows(samples)
        for target in targets:
            if target.path == SHM and settings.decode_loads:
                say("decoding beside loads")
                yield decode_row(target.path, _decode(target, settings))


def engine_options(model: Path, shape: ModelShape, prompt_tokens: int, more: Mapping[str, object]) -> dict[str, object]:
    """Options of `vllm.LLM` that all engines have in common: the whole prompt is one step, nothing is compiled."""
    context = prompt_tokens + _ROOM_TOKENS
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": shape.dtype,
        "block_size": BLOCK_TOKENS,
        "max_model_len": context,
        "max_num_batched_tokens": context,
        "kv_cache_memory_bytes": _ENGINE_CACHE_BYTES,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "seed": 0,
        **more,
    }


def kvpool_transfer(uri: str, transports: Sequence[str]) -> dict[str, object]:
    """`--kv-transfer-config` of an engine that uses the pool at ``uri``."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool_connector.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": uri, "transports": list(transports)},
    }


def blocks_held(pool: kvpool.Client) -> int:
    """Blocks that all nodes of a pool hold; 0 while some are on their way, since those are counted and not visible."""
    status = pool.status()
    return 0 if status.counters["reservations"] else sum(node.blocks for node in status.nodes)


def await_landed(held: Callable[[], int], blocks: int, timeout_s: float = LAND_S) -> None:
    """Wait until a pool holds ``blocks``; raises DeadlineError."""
    if not wait_until(lambda: held() >= blocks, timeout_s):
        raise DeadlineError(f"the pool holds {held()} blocks after {timeout_s:g} s, not {blocks}: a save is missing")


def reset(engine: EngineProcess) -> None:
    """Empty an engine's own cache, once no save holds blocks of it any more; raises DeadlineError."""
    if not wait_until(engine.reset_prefix_cache, LAND_S):
        raise DeadlineError(f"{engine.name} did not reset its prefix cache within {LAND_S:g} s")


@contextlib.contextmanager
def _targets(settings: VllmSettings, say: Callable[[str], None]) -> Iterator[list[Target]]:
    """All engines and the stores that they save to."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        model = write_model(folder / "model", BENCH_MODEL)
        helds: dict[str, Callable[[], int]] = {}
        transfers: dict[str, Mapping[str, object]] = {}
        environs: dict[str, Mapping[str, str]] = {}
        pooled = [path for path in settings.engines if path in _TRANSPORTS]
        if pooled:
            size = len(pooled) * settings.saved_bytes
            pool = stack.enter_context(pool_processes(size * 5 // 4 // PAGE_BYTES * PAGE_BYTES))
            client = stack.enter_context(kvpool.connect(pool.uri))
            for path in pooled:
                transfers[path] = kvpool_transfer(pool.uri, (_TRANSPORTS[path],))
                helds[path] = lambda: blocks_held(client)
        if MOONCAKE in settings.engines:
            store = stack.enter_context(mooncake_store(2 * settings.saved_bytes, folder))
            environs[MOONCAKE], helds[MOONCAKE], transfers[MOONCAKE] = store.environ, store.keys, KV_TRANSFER
        say(f"starting {len(settings.engines)} engines")
        targets = []
        for path in settings.engines:
            more = {"kv_transfer_config": transfers[path]} if path in transfers else {}
            options = engine_options(model, BENCH_MODEL, settings.prompt_tokens, {"load_format": "dummy", **more})
            environ = {**environs.get(path, {}), **bound_to(settings.cpus)}
            engine = EngineProcess(path, options, folder / f"{path}.log", environ)
            targets.append(Target(path, stack.enter_context(engine), helds.get(path)))
        for target in targets:
            target.engine.ready()
        try:
            yield targets
        finally:
            for target in targets:
                target.engine.quit()  # all at once; the stack then waits for each


def _prompt(settings: VllmSettings, path: str, number: int) -> list[int]:
    """A prompt of its own for every engine and round: the engines share a pool."""
    return prompt_of(1_000 * (PATHS.index(path) + 1) + number, settings.prompt_tokens)


def _sample(target: Target, prompt: list[int]) -> Sample:
    engine = target.engine
    computed, landed_s = _computed(target, prompt)
    if computed.cached_tokens:
        raise KvpoolError(f"engine {target.path} had {computed.cached_tokens} tokens of a new prompt")
    again = engine.generate(prompt)
    _check_loaded(target.path, again.cached_tokens, len(prompt))
    reset(engine)
    return Sample(
        computed_s=computed.ttft_s, again_s=again.ttft_s, cached_tokens=again.cached_tokens, landed_s=landed_s
    )


def _computed(target: Target, prompt: list[int]) -> tuple[Generated, float]:
    """The answer to a new prompt, and the seconds from then until it is saved; then the engine's own cache is empty.

    An engine does not reset while a save reads its blocks: with Mooncake that is what tells that a save is complete,
    since the master counts a key as soon as its put begins.
    """
    if target.held is None:
        return target.engine.generate(prompt), 0.0
    before = target.held()
    computed = target.engine.generate(prompt)
    landed_s = elapsed_s(lambda: _land(target, before + len(prompt) // BLOCK_TOKENS))
    return computed, landed_s


def _land(target: Target, blocks: int) -> None:
    assert target.held is not None
    await_landed(target.held, blocks)
    reset(target.engine)


def _decode(target: Target, settings: VllmSettings) -> list[Decoded]:
    """Run a request beside others that load; first all that they will load is saved."""
    prompts = [_prompt(settings, target.path, settings.rounds + 1 + i) for i in range(settings.decode_loads)]
    for prompt in prompts:
        _computed(target, prompt)
    runs = []
    for i in range(DECODE_RUNS):
        running = prompt_of(i, DECODE_PROMPT_TOKENS)
        tokens = DECODE_TOKENS_BETWEEN * (len(prompts) + 1)
        command = Decode(prompt=running, max_tokens=tokens, beside=prompts, every=DECODE_TOKENS_BETWEEN)
        run = target.engine.decode(command)
        _check_loaded(target.path, run.cached_tokens, len(prompts) * settings.prompt_tokens)
        reset(target.engine)
        runs.append(run)
    return runs


def _check_loaded(path: str, cached_tokens: int, prompt_tokens: int) -> None:
    """Times of loads that did not happen must not be reported as times of loads."""
    if cached_tokens < prompt_tokens // 2:
        raise KvpoolError(f"engine {path} computed a saved prompt: only {cached_tokens} of {prompt_tokens} tokens came")
