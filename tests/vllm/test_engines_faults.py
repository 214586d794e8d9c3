"""Whatever happens to the pool, an engine answers as if there were none, in bounded time, and goes on using it after.

Loads are held at known points while something breaks. Policy is `recompute`, but where a test says otherwise.
"""

import signal
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from tests.vllm.engine_fixtures import BLOCK_TOKENS, ENGINE, NODE_BYTES, SHORT
from tests.vllm.engines import Engine, soon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

TTFT_MAX_S = 30
"""Far above all time-outs of the connector together, which are 7 s here."""


@pytest.fixture(params=["tcp", "shm"])
def loader(request, cluster):
    """Each engine in turn loads what the other has saved."""
    return getattr(cluster, request.param)


WHICHEVER = pytest.mark.parametrize("loader", ["tcp"], indirect=True)
"""Where blocks are not moved while something breaks, one way to move them is enough: each test takes seconds."""


@pytest.fixture
def saver(loader, cluster):
    return cluster.shm if loader is cluster.tcp else cluster.tcp


@contextmanager
def frozen(cluster, process):
    cluster.pool.signal(process, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.pool.signal(process, signal.SIGCONT)


def check(cluster, engine, asked, answer):
    """The answer is right, came in time, and left nothing behind in the engine."""
    cluster.check(asked, answer)
    assert answer.ttft_s < TTFT_MAX_S
    engine.check_idle()


def check_recovers(cluster, saver, loader, prompt):
    """Both engines use the pool again, without a restart, and the pool holds nothing for what failed."""
    cluster.heal()
    asked = prompt(200)
    cluster.saved(saver, asked)
    warm = loader.ask(asked)
    check(cluster, loader, asked, warm)
    assert warm.cached_tokens == 200 // BLOCK_TOKENS * BLOCK_TOKENS
    cluster.check_pool_idle()


@WHICHEVER
def test_metadata_service_is_killed(cluster, saver, loader, prompt):
    asked = prompt(300)
    cluster.saved(saver, asked)
    cluster.pool.kill_meta()
    check(cluster, loader, asked, loader.ask(asked))
    fresh = prompt(300)
    check(cluster, loader, fresh, loader.ask(fresh))
    check_recovers(cluster, saver, loader, prompt)


@WHICHEVER
def test_metadata_service_is_frozen(cluster, saver, loader, prompt):
    asked, fresh = prompt(300), prompt(300)
    cluster.saved(saver, asked)
    with frozen(cluster, cluster.pool.meta):
        for each in (asked, fresh):
            answer = loader.ask(each)
            cluster.check(each, answer)
            assert answer.ttft_s < TTFT_MAX_S
        assert not answer.cached_tokens
    check_recovers(cluster, saver, loader, prompt)


def test_metadata_service_is_killed_between_look_up_and_load(cluster, saver, loader, prompt):
    """The blocks are where the answer said, or the load fails: both are right."""
    asked = prompt(600)
    cluster.saved(saver, asked)
    with loader.hold("load") as wait_held:
        running = loader.start(asked)
        wait_held()
        cluster.pool.kill_meta()
    check(cluster, loader, asked, running.answer())
    check_recovers(cluster, saver, loader, prompt)


@pytest.mark.parametrize("hold", ["load", "scatter"])
def test_nodes_are_killed_while_loading(cluster, saver, loader, prompt, hold):
    """Before the first byte, and after the first of several steps."""
    asked = prompt(1_100)
    cluster.saved(saver, asked)
    failures, tokens = loader.count("load_failures"), loader.count("load_tokens")
    with loader.hold(hold) as wait_held:
        running = loader.start(asked)
        wait_held()
        for name in ("n0", "n1"):
            cluster.pool.kill_node(name)
    check(cluster, loader, asked, running.answer())
    if loader is cluster.tcp:
        assert loader.count("load_failures") == failures + 1
        # What vLLM says of cached tokens is not lowered when a part of them could not be loaded.
        assert loader.count("load_tokens") - tokens == (2 * BLOCK_TOKENS if hold == "scatter" else 0)
    check_recovers(cluster, saver, loader, prompt)


def test_nodes_are_frozen_while_loading(cluster, saver, loader, prompt):
    asked = prompt(1_100)
    cluster.saved(saver, asked)
    failures = loader.count("load_failures")
    with loader.hold("scatter") as wait_held:
        running = loader.start(asked)
        wait_held()
        cluster.pool.signal(cluster.pool.nodes["n0"], signal.SIGSTOP)
        cluster.pool.signal(cluster.pool.nodes["n1"], signal.SIGSTOP)
    try:
        check(cluster, loader, asked, running.answer())
    finally:
        for node in cluster.pool.nodes.values():
            cluster.pool.signal(node, signal.SIGCONT)
    if loader is cluster.tcp:
        assert loader.count("load_failures") == failures + 1
    check_recovers(cluster, saver, loader, prompt)


def test_a_slow_node_delays_and_spoils_nothing(cluster, saver, loader, prompt):
    """It stops and goes on again, several times within one load."""
    asked = prompt(1_400)
    cluster.saved(saver, asked)
    nodes = cluster.pool.nodes.values()
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(frozen(cluster, node))
        running = loader.start(asked)
        soon(lambda: loader.worker()["loads"] or running.done, "the load is under way")
    for node in nodes:
        with frozen(cluster, node):
            pass
    check(cluster, loader, asked, running.answer())
    check_recovers(cluster, saver, loader, prompt)


def test_nodes_are_killed_while_saving(cluster, saver, loader, prompt):
    asked = prompt(600)
    with loader.hold("save") as wait_held:
        running = loader.start(asked)
        wait_held()
        for name in ("n0", "n1"):
            cluster.pool.kill_node(name)
    check(cluster, loader, asked, running.answer())
    check_recovers(cluster, saver, loader, prompt)


def test_blocks_are_evicted_between_look_up_and_load(cluster, saver, loader, prompt):
    asked = prompt(600)
    cluster.saved(saver, asked)
    failures = loader.count("load_failures")
    with loader.hold("load") as wait_held:
        running = loader.start(asked)
        wait_held()
        soon(lambda: cluster.held()[0] == 0, "the lease has run out")
        cluster.fill()
    answer = running.answer()
    check(cluster, loader, asked, answer)
    assert not answer.cached_tokens
    assert loader.count("load_failures") == failures + 1
    check_recovers(cluster, saver, loader, prompt)


def corrupt(cluster, expected):
    """Flip a byte of each block with these contents, in the nodes' memory; how many there were."""
    found = 0
    for path in cluster.pool.directory.iterdir():
        if not path.is_file() or path.stat().st_size != NODE_BYTES:
            continue
        memory = np.memmap(path, np.uint8, "r+")
        for block in expected:
            at = bytes(memory).find(block.tobytes())
            if at >= 0:
                memory[at + 12_345] ^= 0x20
                found += 1
        memory.flush()
        del memory
    return found


def test_a_corrupted_block_is_never_used(cluster, saver, loader, prompt):
    """Blocks before it are loaded, the rest is computed; its checksum is what tells."""
    asked = prompt(640)
    known = set(saver.worker()["saved"])
    cluster.saved(saver, asked)
    hashes = [key for key in saver.worker()["saved"] if key not in known]
    assert len(hashes) == 20
    assert corrupt(cluster, [cluster.bytes_of(hashes[7])]) == 1
    failures, verified = loader.count("load_failures"), loader.worker()["verify_failures"]
    tokens = loader.count("load_tokens")
    check(cluster, loader, asked, loader.ask(asked))
    assert loader.count("load_tokens") == tokens + 7 * BLOCK_TOKENS
    assert loader.count("load_failures") == failures + 1
    assert loader.worker()["verify_failures"] > verified
    check_recovers(cluster, saver, loader, prompt)


@pytest.fixture(scope="module")
def strict(model, healthy_cluster, tmp_path_factory):
    """An engine with vLLM's own default: a failed load fails its request."""
    pool = {"pool": healthy_cluster.pool.uri, "transports": ["shm"], **SHORT}
    engine = Engine(model, tmp_path_factory.mktemp("strict") / "log", pool=pool, policy="fail", **ENGINE)
    yield engine.wait_ready()
    engine.close()


def test_with_policy_fail_only_the_request_whose_load_failed_fails(cluster, strict, prompt):
    asked, other = prompt(640), prompt(320)
    known = set(cluster.tcp.worker()["saved"])
    cluster.saved(cluster.tcp, asked)
    cluster.saved(cluster.tcp, other)
    hashes = [key for key in cluster.tcp.worker()["saved"] if key not in known]
    assert corrupt(cluster, [cluster.bytes_of(hashes[3])]) == 1
    with strict.hold("load") as wait_held:
        failing, beside = strict.start(asked), strict.start(other)
        wait_held()
    failed = failing.answer()
    assert (failed.finish, failed.tokens) == ("error", [])
    soon(lambda: strict.said("was promised 20 blocks, got 3 (verify_failed)"), "the log says why")
    check(cluster, strict, other, beside.answer())
    soon(lambda: strict.ask(asked).finish == "length", "it is asked for again")
    check(cluster, strict, asked, strict.ask(asked))
