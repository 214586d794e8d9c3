"""Requests that are aborted or preempted while their blocks move: nothing is mixed up, nothing stays behind."""

from contextlib import closing

import pytest

from tests.vllm.engine_fixtures import BLOCK_TOKENS, ENGINE, SHORT
from tests.vllm.engines import Engine, soon
from tests.vllm.test_engines_faults import frozen

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]


def check_goes_on(cluster, engine, prompt):
    asked = prompt(200)
    cluster.saved(engine, asked)
    engine.check_idle()
    cluster.check_pool_idle()


@pytest.mark.parametrize("hold", ["load", "scatter"])
def test_aborted_while_loading(cluster, prompt, hold):
    asked = prompt(900)
    cluster.saved(cluster.tcp, asked)
    with cluster.shm.hold(hold) as wait_held:
        running = cluster.shm.start(asked)
        wait_held()
        running.abort()
        assert running.answer().finish == "abort"
        beside = prompt(100)
        cluster.check(beside, cluster.shm.ask(beside))
    cluster.shm.check_idle()
    cluster.check(asked, cluster.shm.ask(asked))
    check_goes_on(cluster, cluster.shm, prompt)


def test_aborted_while_the_nodes_it_loads_from_are_silent(cluster, prompt):
    asked = prompt(900)
    cluster.saved(cluster.shm, asked)
    nodes = [cluster.pool.nodes[name] for name in ("n0", "n1")]
    with frozen(cluster, nodes[0]), frozen(cluster, nodes[1]):
        running = cluster.tcp.start(asked)
        soon(lambda: cluster.tcp.worker()["loads"], "the load is under way")
        running.abort()
        cluster.tcp.check_idle()
    cluster.heal()
    cluster.check(asked, cluster.tcp.ask(asked))
    check_goes_on(cluster, cluster.tcp, prompt)


def test_aborted_while_it_is_looked_up(cluster, prompt):
    asked = prompt(300)
    cluster.saved(cluster.tcp, asked)
    with frozen(cluster, cluster.pool.meta):
        running = cluster.shm.start(asked)
        running.abort()
        assert running.answer().finish in ("abort", "length")
        cluster.shm.check_idle()
    cluster.heal()
    check_goes_on(cluster, cluster.shm, prompt)


def test_aborted_while_saving(cluster, prompt):
    """Its blocks are held until they are saved, and what was saved is right."""
    asked = prompt(600)
    with cluster.tcp.hold("save") as wait_held:
        running = cluster.tcp.start(asked, 400)
        wait_held()
        running.abort()
        assert running.answer().finish == "abort"
        assert cluster.tcp.scheduler()["pinned_blocks"] >= 600 // BLOCK_TOKENS
        beside = prompt(100)
        cluster.check(beside, cluster.tcp.ask(beside))
    after = prompt(40)  # held for long, the save no longer keeps the engine stepping: the next request brings its end
    cluster.check(after, cluster.tcp.ask(after))
    cluster.tcp.check_idle()
    warm = cluster.shm.ask(asked)
    cluster.check(asked, warm)
    assert warm.cached_tokens == 600 // BLOCK_TOKENS * BLOCK_TOKENS
    check_goes_on(cluster, cluster.shm, prompt)


def test_aborts_at_any_moment(cluster, prompt):
    """A crowd of requests, every other one aborted wherever it is: waiting, loading, computing or saving."""
    head = prompt(320)
    cluster.saved(cluster.tcp, head)
    asked = [(head if i % 3 else prompt(320)) + prompt(150 + i) for i in range(16)]
    running = [cluster.shm.start(each, 16) for each in asked]
    for i, one in enumerate(running):
        if i % 2:
            if i % 4 == 1:
                soon(lambda i=i: running[i - 1].done, "the one before has ended")
            one.abort()
    for i, one in enumerate(running):
        answer = one.answer()
        if answer.finish == "abort":
            assert i % 2
        else:
            cluster.check(asked[i], answer, 16)
    check_goes_on(cluster, cluster.shm, prompt)


def tiny_engine(model, cluster, folder):
    """An engine whose KV cache holds two requests and a half."""
    pool = {"pool": cluster.pool.uri, "transports": ["shm"], **SHORT}
    options = {**ENGINE, "max_model_len": 1_024, "num_gpu_blocks_override": 40}
    return closing(Engine(model, folder / "log", pool=pool, **options))


@pytest.fixture(scope="module")
def tiny(model, healthy_cluster, tmp_path_factory):
    with tiny_engine(model, healthy_cluster, tmp_path_factory.mktemp("tiny")) as engine:
        yield engine.wait_ready()


@pytest.fixture
def passing(model, cluster, tmp_path):
    """One for a test that leaves it apart from the others."""
    with tiny_engine(model, cluster, tmp_path) as engine:
        yield engine.wait_ready()


def preemptions(engine):
    return engine.metrics()["vllm:num_preemptions"]


def test_preempted_while_saving_and_loading(cluster, tiny, prompt):
    """Requests outgrow the cache; what they lost is loaded again, or computed, and every answer is right."""
    asked = [prompt(length) for length in (290, 300, 310, 320, 330, 340)]
    failures = tiny.count("load_failures")
    for _ in range(3):
        before = preemptions(tiny)
        running = [tiny.start(each, 160) for each in asked]
        for each, one in zip(asked, running, strict=True):
            cluster.check(each, one.answer(), 160)
        tiny.check_idle()
        assert preemptions(tiny) > before
        assert tiny.reset()
    assert tiny.count("load_tokens")
    assert tiny.count("load_failures") == failures
    for each in asked:
        warm = cluster.shm.ask(each, 160)  # what was saved meanwhile is right
        cluster.check(each, warm, 160)
    cluster.check_pool_idle()


def test_preempted_while_saves_are_slow(cluster, tiny, prompt):
    """Saves hold a part of the cache, and let go of it in the end, whoever waits."""
    asked = [prompt(300) for _ in range(4)]
    before = preemptions(tiny)
    with tiny.hold("save") as wait_held:
        running = [tiny.start(each, 160) for each in asked]
        wait_held()
        soon(lambda: preemptions(tiny) > before or all(one.done for one in running), "the cache is full")
    for each, one in zip(asked, running, strict=True):
        cluster.check(each, one.answer(), 160)
    tiny.check_idle()
    for each in asked:
        cluster.check(each, cluster.shm.ask(each, 160), 160)
    cluster.check_pool_idle()


def test_preempted_while_loads_are_slow(cluster, tiny, prompt):
    """Loads hold their blocks while others run, outgrow the cache and come back."""
    loaded = [prompt(320), prompt(320)]
    for each in loaded:
        cluster.saved(cluster.tcp, each)
    others = [prompt(300) for _ in range(3)]
    before = preemptions(tiny)
    with tiny.hold("load") as wait_held:
        running = [tiny.start(each, 160) for each in loaded]
        wait_held()  # whether both are admitted at once is vLLM's to say: the cache is small
        running += [tiny.start(each, 160) for each in others]
        soon(lambda: preemptions(tiny) > before or all(one.done for one in running[2:]), "the cache is full")
    for each, one in zip(loaded + others, running, strict=True):
        cluster.check(each, one.answer(), 160)
    tiny.check_idle()
    cluster.check_pool_idle()


def test_after_a_reset_nothing_saved_before_is_found(cluster, passing, prompt):
    """As after new weights: this engine has a new namespace, and the others keep theirs."""
    asked = prompt(320)
    cluster.saved(cluster.tcp, asked)
    known = passing.scheduler()["namespace"]
    assert passing.reset(connector=True)
    assert passing.scheduler()["namespace"] != known
    soon(lambda: passing.scheduler()["reached"], "the new namespace is open")
    cold = passing.ask(asked)
    cluster.check(asked, cold)
    assert not cold.cached_tokens
    passing.wait_saved()
    assert passing.reset()
    assert passing.ask(asked).cached_tokens == 320 - BLOCK_TOKENS or passing.count("save_blocks")
    assert cluster.shm.ask(asked).cached_tokens == 320
    passing.check_idle()
