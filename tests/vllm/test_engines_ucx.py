"""Two engines share a pool over UCX alone, with TCP underneath: bytes, answers, and a node that dies."""

import itertools
from contextlib import ExitStack

import pytest

from kvpool.bench.vllm_model import DEMO_MODEL, prompt_of
from tests.integration.conftest import Pool
from tests.vllm.engine_fixtures import BLOCK_BYTES, BLOCK_TOKENS, ENGINE, META, SHORT
from tests.vllm.engines import Engine, soon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(360)]

STEP = {"KVPOOL_PROBE_LOAD_STEP": str(2 * BLOCK_BYTES)}
"""Loads go in many steps."""

LENGTHS = [33, 101, 300, 1_500]


def uses_pool(engine):
    """Whether the engine saves what it computes now; it starts without its pool."""
    before = engine.count("save_blocks")
    engine.ask(prompt_of(next(_seeds), 2 * BLOCK_TOKENS, DEMO_MODEL.vocabulary), 1)
    engine.wait_saved()
    return engine.count("save_blocks") > before


_seeds = itertools.count(1 << 33)


@pytest.fixture(scope="module")
def started_engines(model, tmp_path_factory):
    """The pool, and two engines that have no way to it but UCX."""
    logs = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("UCX_TLS", "tcp,self")
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta(**META)
        started = []
        for name in ("first", "second"):
            settings = {"pool": pool.uri, "transports": ["ucx"], **SHORT}
            started.append(Engine(model, logs / f"{name}.log", pool=settings, environ=STEP, **ENGINE))
            stack.callback(started[-1].close)
        for engine in started:
            engine.wait_ready()
        yield pool, *started
        for engine in started:
            engine.quit()


@pytest.fixture
def engines(started_engines):
    """The same, with a node that runs."""
    pool, *both = started_engines
    if "n0" not in pool.nodes:
        pool.start_node("n0", "64MiB", ucx=True)
    for engine in both:
        engine.reset()
        soon(lambda engine=engine: uses_pool(engine), "the engine uses the pool")
    return pool, *both


def loaded_bytes(engine):
    """What it has loaded, all of it over UCX."""
    by_transport = engine.worker()["loaded_bytes"]
    assert by_transport.keys() <= {"ucx"}
    return by_transport.get("ucx", 0)


def kill_node(pool):
    pool.kill(pool.nodes.pop("n0"))


def test_what_one_engine_computed_the_other_loads_over_ucx(engines, prompt):
    _, first, second = engines
    prompts = [prompt(length) for length in LENGTHS]
    computed = [first.ask(asked) for asked in prompts]
    first.wait_saved()
    before, failures = loaded_bytes(second), [engine.count("load_failures") for engine in (first, second)]

    loaded = [second.ask(asked) for asked in prompts]

    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in computed]
    blocks = [length // BLOCK_TOKENS for length in LENGTHS]
    assert [answer.cached_tokens for answer in loaded] == [count * BLOCK_TOKENS for count in blocks]
    assert loaded_bytes(second) - before == sum(blocks) * BLOCK_BYTES
    saved, taken = first.worker()["saved"], second.worker()["loaded"]
    assert {key: saved[key] for key in taken} == taken, "byte for byte"
    for engine in (first, second):
        engine.check_idle()
    assert [engine.count("load_failures") for engine in (first, second)] == failures


def test_engines_answer_on_when_the_node_dies(engines, prompt):
    pool, first, second = engines
    asked = prompt(400)
    computed = first.ask(asked)
    first.wait_saved()

    kill_node(pool)

    assert second.ask(asked).tokens == computed.tokens
    second.check_alive()


def test_engines_answer_on_when_the_node_dies_in_mid_load(engines, prompt):
    pool, first, second = engines
    asked = prompt(1_100)
    computed = first.ask(asked)
    first.wait_saved()
    failures, tokens = second.count("load_failures"), second.count("load_tokens")

    with second.hold("scatter") as wait_held:  # the first step of several has been read
        running = second.start(asked)
        wait_held()
        kill_node(pool)

    assert running.answer().tokens == computed.tokens
    assert second.count("load_failures") == failures + 1
    assert second.count("load_tokens") == tokens + 2 * BLOCK_TOKENS
    second.check_alive()
