"""The connector among others: beside another one, with vLLM's ways to run a step, and on models it does not support."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvpool.bench.vllm_model import BLOCK_TOKENS, DEMO_MODEL, prompt_of
from kvpool_connector.vllm import CONNECTOR, register
from tests.integration.conftest import Pool
from tests.vllm.serving import Server
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

BLOCKS = 20
PROMPT_TOKENS = BLOCKS * BLOCK_TOKENS + 3
HYBRID = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4 * BLOCK_TOKENS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": DEMO_MODEL.vocabulary,
    "max_position_embeddings": 4_096,
    "torch_dtype": "float32",
}
"""Windows and full attention by turns: two KV cache groups."""


def ask_prompt(seed):
    return prompt_of(seed, PROMPT_TOKENS, DEMO_MODEL.vocabulary)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compositions")


@pytest.fixture(scope="module")
def printed(folder):
    """What `kvpool vllm-config` prints for a pool that runs meanwhile."""
    with ExitStack() as stack:
        pool = Pool(folder, stack)
        pool.start_meta()
        pool.start_node("n0", "256MiB")
        command = [sys.executable, "-m", "kvpool.cli.main", "vllm-config", "--pool", pool.uri]
        yield subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def by_name(printed):
    """The same for one of several connectors, found by its name alone."""
    config = json.loads(printed)
    del config["kv_connector_module_path"]
    return config


@pytest.fixture(scope="module")
def started(folder, model, printed, by_name):
    """All at once: they start beside each other."""
    hybrid = folder / "hybrid"
    hybrid.mkdir()
    (hybrid / "config.json").write_text(json.dumps(HYBRID))
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
                },
                by_name,
            ]
        },
    }
    with (
        Server(
            model, folder / "plain.log", printed, async_scheduling=True, max_num_batched_tokens=4 * BLOCK_TOKENS
        ) as plain,
        Server(model, folder / "several.log", several, max_num_batched_tokens=2_048) as several_connectors,
        Server(hybrid, folder / "hybrid.log", by_name, load_format="dummy") as hybrid_model,
    ):
        yield {"plain": plain.ready(), "several": several_connectors.ready(), "hybrid": hybrid_model.ready()}


@pytest.fixture(scope="module")
def plain(started):
    """Started with what the command prints, computing a prompt in several steps, two of them in flight."""
    return started["plain"]


@pytest.fixture(scope="module")
def several(started):
    return started["several"]


@pytest.fixture(scope="module")
def hybrid(started):
    return started["hybrid"]


def saved(engine, prompt, **options):
    """Have the engine compute a prompt, and wait until the pool has it."""
    before = engine.metric("vllm:kvpool_save_blocks_total")
    answer = engine.ask(prompt, **options)
    assert answer.cached_tokens == 0
    eventually(lambda: engine.metric("vllm:kvpool_save_blocks_total") >= before + BLOCKS)
    return answer


def test_vllm_finds_the_connector_by_its_entry_point():
    (point,) = entry_points(group="vllm.general_plugins", name="kvpool")
    assert point.load() is register


def test_chunks_and_steps_in_flight_save_and_load_whole_prompts(plain):
    prompts = [ask_prompt(seed) for seed in range(10, 14)]
    computed = [saved(plain, prompt) for prompt in prompts]
    plain.forget()
    failures = plain.metric("vllm:kvpool_load_failures_total")
    with ThreadPoolExecutor(len(prompts)) as asking:
        loaded = list(asking.map(plain.ask, prompts))

    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in computed]
    assert [answer.cached_tokens for answer in loaded] == [BLOCKS * BLOCK_TOKENS] * len(prompts)
    assert plain.metric("vllm:kvpool_load_failures_total") == failures


def test_metrics_show_what_came_from_the_pool(plain):
    prompt = ask_prompt(20)
    saved(plain, prompt)
    plain.forget()
    names = {
        "hits": ("vllm:external_prefix_cache_hits_total", {}),
        "host": ("vllm:prompt_tokens_cached_by_source_total", {"source": "host"}),
        "loaded": ("vllm:kvpool_load_tokens_total", {}),
        "lookups": ("vllm:kvpool_lookups_total", {}),
        "seconds": ("vllm:kvpool_load_seconds_count", {}),
    }
    before = {key: plain.metric(name, **labels) for key, (name, labels) in names.items()}
    plain.ask(prompt)

    now = {key: plain.metric(name, **labels) for key, (name, labels) in names.items()}
    grown = {key: now[key] - before[key] for key in names}
    tokens = BLOCKS * BLOCK_TOKENS
    assert grown == {"hits": tokens, "host": tokens, "loaded": tokens, "lookups": 1, "seconds": 1}
    assert plain.metric("vllm:kvpool_hook_failures_total") == 0


def test_a_salt_is_shared_only_by_those_who_have_it(plain):
    prompt = ask_prompt(30)
    answer = saved(plain, prompt, salt="ours")
    plain.forget()

    assert plain.ask(prompt, salt="theirs") == answer
    assert plain.ask(prompt) == answer, "and without a salt it is a third one's"
    plain.forget()
    again = plain.ask(prompt, salt="ours")
    assert (again.tokens, again.cached_tokens) == (answer.tokens, BLOCKS * BLOCK_TOKENS)


def test_beside_another_connector_only_the_chosen_one_loads(several, folder):
    prompt = ask_prompt(40)
    computed = saved(several, prompt)
    loaded = several.metric("vllm:kvpool_load_tokens_total")

    several.forget()
    from_other = several.ask(prompt)
    assert several.said("Inject KV cache of")
    assert several.metric("vllm:kvpool_load_tokens_total") == loaded
    shutil.rmtree(folder / "example")
    several.forget()
    from_pool = several.ask(prompt)

    assert several.metric("vllm:kvpool_load_tokens_total") == loaded + BLOCKS * BLOCK_TOKENS
    assert from_other.tokens == from_pool.tokens == computed.tokens
    assert from_pool.cached_tokens == BLOCKS * BLOCK_TOKENS
    assert several.metric("vllm:kvpool_hook_failures_total") == 0


def test_a_handshake_of_another_connector_is_explained(engines, caplog):
    """`MultiConnector` gives all its children the first handshake that it finds."""
    connector = engines.build().pool_connector
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})

    (said,) = [record.getMessage() for record in caplog.records if record.name == "vllm.kvpool"]
    assert "kvpool is not used by this engine" in said
    assert "name kvpool before" in said


def test_a_hybrid_model_is_answered_without_the_pool_and_says_so_once(hybrid):
    prompts = [ask_prompt(seed) for seed in (50, 51)]
    computed = [hybrid.ask(prompt) for prompt in prompts]
    hybrid.forget()
    again = [hybrid.ask(prompt) for prompt in prompts]

    assert again == computed
    assert {answer.cached_tokens for answer in computed} == {0}
    for name in ("lookups", "lookup_failures", "load_tokens", "save_blocks", "save_dropped_blocks", "hook_failures"):
        assert hybrid.metric(f"vllm:kvpool_{name}_total") == 0
    (said,) = hybrid.said("WARNING.*kvpool")
    assert "2 KV cache groups" in said
    assert CONNECTOR in hybrid.log.read_text()
