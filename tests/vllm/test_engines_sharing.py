"""Two engines share a pool: what one computed the other loads, byte for byte, and answers as if there were no pool."""

import pytest

from tests.vllm.engine_fixtures import BLOCK_BYTES, BLOCK_TOKENS
from tests.vllm.engines import digest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

LENGTHS = [7, 31, 32, 33, 64, 101, 300, 1_024, 1_500]
"""Shorter than a block, a block, blocks and a rest, more than a step's tokens."""


def blocks_of(tokens):
    return tokens // BLOCK_TOKENS


def reusable(tokens):
    """Tokens of whole blocks. vLLM computes a prompt's last token anew, and counts it as cached all the same."""
    return blocks_of(tokens) * BLOCK_TOKENS


def test_an_engine_starts_without_a_pool_and_uses_it_once_it_is_there(cluster, prompt):
    assert cluster.before_pool
    for asked, answer in cluster.before_pool:
        cluster.check(asked, answer)
    asked = prompt(200)
    cluster.saved(cluster.tcp, asked)
    assert cluster.shm.ask(asked).cached_tokens == reusable(200)


@pytest.mark.parametrize(("saver", "loader"), [("tcp", "shm"), ("shm", "tcp")])
def test_answers_are_those_without_a_pool(cluster, prompt, saver, loader):
    first, second = getattr(cluster, saver), getattr(cluster, loader)
    head = prompt(160)
    prompts = [prompt(length) for length in LENGTHS] + [head + prompt(rest) for rest in (1, 32, 77)]
    before = second.worker()["loaded_bytes"]
    failures = [engine.count("load_failures") for engine in cluster.engines]
    for asked in prompts:
        assert cluster.saved(first, asked).cached_tokens in (0, 160), "cold, but for the common head"
    for asked in prompts:
        warm = second.ask(asked)
        cluster.check(asked, warm)
        assert warm.cached_tokens == reusable(len(asked))
    loaded = {t: n - before.get(t, 0) for t, n in second.worker()["loaded_bytes"].items()}
    alone = sum(blocks_of(length) for length in LENGTHS)
    assert loaded == {loader: (alone + 5 + 1 + 2) * BLOCK_BYTES}
    for engine in cluster.engines:
        engine.check_idle()
    assert [engine.count("load_failures") for engine in cluster.engines] == failures


def test_bytes_loaded_are_the_bytes_saved(cluster, prompt):
    known = set(cluster.tcp.worker()["saved"])
    asked = [prompt(length) for length in (500, 1_100)]
    for each in asked:
        cluster.saved(cluster.tcp, each)
    saved = {key: value for key, value in cluster.tcp.worker()["saved"].items() if key not in known}
    assert len(saved) == sum(blocks_of(len(each)) for each in asked)
    assert {key: digest(cluster.bytes_of(key)) for key in saved} == saved, "what lies in the pool"
    for each in asked:
        cluster.check(each, cluster.shm.ask(each))
    loaded = cluster.shm.worker()["loaded"]
    assert {key: loaded.get(key) for key in saved} == saved, "what lies in the other engine's memory"


def test_an_engine_loads_what_it_saved_itself_and_forgot(cluster, prompt):
    asked = prompt(700)
    cluster.saved(cluster.shm, asked)
    assert cluster.shm.reset()
    again = cluster.shm.ask(asked)
    cluster.check(asked, again)
    assert again.cached_tokens == reusable(700)


def test_the_next_turn_finds_generated_blocks(cluster, prompt):
    turn = prompt(150)
    answer = cluster.saved(cluster.tcp, turn, 60)
    # The last token was not fed back, so that its keys are not there.
    history = [*turn, *answer.tokens]
    following = history + prompt(40)
    reply = cluster.shm.ask(following)
    cluster.check(following, reply)
    assert reply.cached_tokens == blocks_of(len(history) - 1) * BLOCK_TOKENS > 150


def test_many_requests_with_one_new_prefix_load_it_once(cluster, prompt):
    head = prompt(640)
    cluster.saved(cluster.tcp, head)
    before = cluster.shm.worker()["loaded_bytes"].get("shm", 0)
    asked = [head + prompt(20) for _ in range(12)]
    running = [cluster.shm.start(each) for each in asked]
    for each, one in zip(asked, running, strict=True):
        cluster.check(each, one.answer())
    loaded = cluster.shm.worker()["loaded_bytes"]["shm"] - before
    assert loaded <= 2 * blocks_of(640) * BLOCK_BYTES
    cluster.shm.check_idle()
