"""Tensor parallelism: each rank saves and loads its own shard, and engines of another layout share none of them."""

from contextlib import ExitStack

import pytest

import kvpool
from kvpool.bench.vllm_model import BLOCK_TOKENS, DEMO_MODEL, prompt_of
from kvpool.core.namespace import parse_namespace
from tests.integration.conftest import Pool
from tests.vllm.serving import Server, kv_transfer
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)  # three engines, five workers

BLOCKS = 31
PROMPT_TOKENS = BLOCKS * BLOCK_TOKENS + 5
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EACH_ITS_CORE = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta()
        pool.start_node("n0", "128MiB")
        yield pool


@pytest.fixture(scope="module")
def prompts():
    return [prompt_of(seed, PROMPT_TOKENS, DEMO_MODEL.vocabulary) for seed in (1, 2)]


@pytest.fixture(scope="module")
def computed(pool, model, prompts, tmp_path_factory):
    """What an engine of two ranks answers to what nobody has computed; it saves it, and is gone."""
    log = tmp_path_factory.mktemp("writer") / "log"
    with Server(model, log, kv_transfer(pool.uri), environ=EACH_ITS_CORE, **TWO_RANKS) as writer:
        writer.ready()
        answers = [writer.ask(prompt) for prompt in prompts]
        eventually(lambda: writer.metric("vllm:kvpool_save_blocks_total") == len(prompts) * BLOCKS)
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def engines(computed, pool, model, tmp_path_factory):
    """One engine with the writer's layout, and one of a single rank."""
    logs = tmp_path_factory.mktemp("readers")
    with (
        Server(model, logs / "two", kv_transfer(pool.uri), environ=EACH_ITS_CORE, **TWO_RANKS) as two,
        Server(model, logs / "one", kv_transfer(pool.uri)) as one,
    ):
        yield {"two": two.ready(), "one": one.ready()}


def test_an_engine_of_the_same_layout_loads_every_ranks_shard(engines, prompts, computed):
    answers = [engines["two"].ask(prompt) for prompt in prompts]

    assert [answer.tokens for answer in answers] == computed
    assert [answer.cached_tokens for answer in answers] == [BLOCKS * BLOCK_TOKENS] * 2
    loaded_tokens = len(prompts) * BLOCKS * BLOCK_TOKENS
    assert engines["two"].metric("vllm:kvpool_load_tokens_total") == loaded_tokens
    # Each rank holds half of the heads: all bytes were loaded, by both together.
    assert engines["two"].metric("vllm:kvpool_load_bytes_total") == loaded_tokens * DEMO_MODEL.kv_bytes_per_token
    assert engines["two"].metric("vllm:kvpool_load_failures_total") == 0


def test_an_engine_of_another_layout_misses_and_says_why(engines, prompts, computed):
    answers = [engines["one"].ask(prompt) for prompt in prompts]

    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert [answer.tokens for answer in answers] == computed
    assert engines["one"].metric("vllm:kvpool_lookup_hit_tokens_total") == 0
    (said,) = engines["one"].said("which this engine cannot use")
    assert "shards: 1 != 2" in said
    assert "parallel: 'tp1 pp1' != 'tp2 pp1'" in said
    assert f"block_bytes: {BLOCK_TOKENS * DEMO_MODEL.kv_bytes_per_token} != " in said
    assert "revision" not in said


def test_the_pool_knows_how_many_shards_a_block_has(engines, pool):
    with kvpool.connect(pool.uri) as client:
        documents = client.status().namespaces.values()

    spaces = [parse_namespace(document.encode()) for document in documents]
    assert {space.shards: space.parallel for space in spaces} == {1: "tp1 pp1", 2: "tp2 pp1"}
