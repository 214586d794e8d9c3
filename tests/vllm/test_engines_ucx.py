"""Two engines share a pool over UCX alone, with TCP underneath: bytes, answers, and a node that dies."""

import itertools
from contextlib import ExitStack

import pytest

from kvpool.bench.vllm_model import DEMO_MODEL, prompt_of
from tests.integration.conftest import Pool
from tests.vllm.engine_fixtures import BLOCK_BYTES, BLOCK_TOKENS, ENGINE, META, SHORT
from tests.vllm.engines import Engine, soon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

LENGTHS = [33, 101, 300, 1_500]


def uses_pool(engine):
    """Whether the engine saves what it computes now; it starts without its pool."""
    before = engine.count("save_blocks")
    engine.ask(prompt_of(next(_seeds), 2 * BLOCK_TOKENS, DEMO_MODEL.vocabulary), 1)
    engine.wait_saved()
    return engine.count("save_blocks") > before


_seeds = itertools.count(1 << 33)


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory):
    """The pool, and two engines that have no way to it but UCX."""
    logs = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("UCX_TLS", "tcp,self")
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta(**META)
        pool.start_node("n0", "64MiB", ucx=True)
        started = []
        for name in ("first", "second"):
            settings = {"pool": pool.uri, "transports": ["ucx"], **SHORT}
            started.append(Engine(model, logs / f"{name}.log", pool=settings, **ENGINE))
            stack.callback(started[-1].close)
        for engine in started:
            engine.wait_ready()
            soon(lambda engine=engine: uses_pool(engine), "the engine has reached the pool")
        yield pool, *started
        for engine in started:
            engine.quit()


def test_what_one_engine_computed_the_other_loads_over_ucx(engines, prompt):
    _, first, second = engines
    prompts = [prompt(length) for length in LENGTHS]
    computed = [first.ask(asked) for asked in prompts]
    first.wait_saved()

    loaded = [second.ask(asked) for asked in prompts]

    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in computed]
    blocks = [length // BLOCK_TOKENS for length in LENGTHS]
    assert [answer.cached_tokens for answer in loaded] == [count * BLOCK_TOKENS for count in blocks]
    assert second.worker()["loaded_bytes"] == {"ucx": sum(blocks) * BLOCK_BYTES}
    saved, taken = first.worker()["saved"], second.worker()["loaded"]
    assert {key: saved[key] for key in taken} == taken, "byte for byte"
    for engine in (first, second):
        engine.check_idle()
        assert engine.count("load_failures") == 0


def test_engines_answer_on_when_the_node_dies(engines, prompt):
    pool, first, second = engines
    asked = prompt(400)
    computed = first.ask(asked)
    first.wait_saved()

    pool.kill(pool.nodes["n0"])

    assert second.ask(asked).tokens == computed.tokens
    second.check_alive()
