"""Lookups: the engine waits for them a moment at most, and every lease is let go."""

import time

import pytest

from kvpool import Keyspace
from kvpool_connector.vllm import calls, gate
from tests.vllm.shapes import BLOCK, Shape
from tests.waiting import eventually

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def leases(monkeypatch):
    """Leases that lookups have got and nobody has released, and how many there were."""
    given, released = [], []
    match, release = Keyspace.match, Keyspace.release

    def matching(self, hashes, **options):
        answer = match(self, hashes, **options)
        if answer.lease:
            given.append(answer.lease)
        return answer

    def releasing(self, matched, **options):
        released.append(matched.lease)
        release(self, matched, **options)

    monkeypatch.setattr(Keyspace, "match", matching)
    monkeypatch.setattr(Keyspace, "release", releasing)
    return given, released


def saved(engines, prompt):
    engine = engines.start()
    engine.generate(prompt)


@KINDS
def test_a_silent_service_costs_a_bounded_wait(own_engines, tokens, asynchronous):
    """V13: it accepts and never answers; requests wait until the lookups' deadline, then compute."""
    engine = own_engines.start(Shape(asynchronous=asynchronous), lookup_timeout_s=0.2, save_timeout_s=0.2)
    own_engines.freeze_meta()
    names = [engine.add(tokens(2 * BLOCK + 1), 3) for _ in range(4)]
    engine.run()
    for name in names:
        assert engine.outputs[name] == engine.expected_output(name, 3)
    assert engine.count("lookup_timeouts") + engine.count("lookup_failures") >= 1
    assert engine.count("lookup_hit_tokens") == 0
    engine.check_nothing_leaked()
    own_engines.thaw_meta()


def test_a_step_has_one_budget_for_all_its_lookups(own_engines, tokens, monkeypatch):
    """Sixteen requests without an answer wait together for one budget, not for sixteen."""
    engine = own_engines.start(step_budget_s=0.05, lookup_timeout_s=10)
    own_engines.freeze_meta()
    for _ in range(16):
        engine.add(tokens(2 * BLOCK))
    waits = []
    get = engine.half._calls.answers.get

    class Answers:
        def get(self, timeout):
            waits.append(timeout)
            return get(timeout=timeout)

        def get_nowait(self):
            return get(block=False)

    monkeypatch.setattr(engine.half._calls, "answers", Answers())
    engine.step()
    assert len(waits) == 16
    assert waits[0] == 0.05
    assert waits[1:] == [0.0] * 15
    assert engine.step().total_num_scheduled_tokens == 0
    assert len(waits) == 32
    own_engines.thaw_meta()


def test_a_request_takes_its_turn_when_its_lookup_ends(engines, tokens):
    """The answer is (None, False) until then; others go on meanwhile."""
    engine = engines.start()
    running = engine.add(tokens(BLOCK), 3 * BLOCK)
    engine.run(lambda: engine.outputs[running])
    prompt = tokens(3 * BLOCK + 1)
    saved(engines, prompt)
    held = engines.hold(Keyspace, "match")
    name = engine.add(prompt, 2)
    for _ in range(3):
        assert set(engine.step().num_scheduled_tokens) == {running}
    held.open()
    engine.run()
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.count("load_tokens") == 3 * BLOCK


def test_leases_are_released_by_loads_aborts_and_ends(engines, tokens, leases):
    """Whatever becomes of a request, its lease is let go."""
    given, released = leases
    prompt = tokens(3 * BLOCK + 1)
    saved(engines, prompt)
    engine = engines.start(Shape(sequences=1))
    loaded = engine.add(prompt, 3)
    waiting = [engine.add([*prompt, 8]), engine.add([*prompt, 9])]
    eventually(lambda: len(given) == 3)
    engine.step()
    engine.abort(waiting[0])
    engine.run()
    assert engine.outputs[loaded] == engine.expected_output(loaded, 3)
    eventually(lambda: sorted(released) == sorted(given))


def test_leases_are_renewed_when_asked_again(engines, tokens, leases, monkeypatch):
    """A request that waits long is looked up anew at half of its lease, and the old lease is released: only then."""
    given, released = leases
    now = [time.monotonic()]
    prompt = tokens(3 * BLOCK + 1)
    saved(engines, prompt)
    engine = engines.start()
    engine.half.book._clock = lambda: now[0]
    name = engine.add(prompt)
    eventually(lambda: len(given) == 1)
    request = engine.requests[name]
    now[0] += 29.0
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)
    assert len(given) == 1
    now[0] += 2.0
    engine.run(lambda: engine.connector.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True))
    assert len(given) == 2
    eventually(lambda: released == given[:1])
    engine.drain()
    eventually(lambda: sorted(released) == sorted(given))


def test_asking_has_no_side_effects(engines, tokens):
    """Asked in every step until it is admitted: one lookup, the same answer, no load."""
    prompt = tokens(3 * BLOCK + 1)
    saved(engines, prompt)
    engine = engines.start()
    name = engine.add(prompt)
    request = engine.requests[name]
    answers = {engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(20)} - {(None, False)}
    assert answers <= {(3 * BLOCK, True)}
    engine.drain()
    assert engine.count("lookup_tokens") == 3 * BLOCK
    assert len(engine.load_jobs) == 1


def test_the_plan_follows_the_local_hit(engines, tokens):
    """V36: the allocation failed, and the local hit has changed when it is asked again; the last answer counts."""
    prompt = tokens(5 * BLOCK + 1)
    saved(engines, prompt)
    engine = engines.start()
    name = engine.add(prompt, 2)
    request = engine.requests[name]
    eventually(lambda: engine.connector.get_num_new_matched_tokens(request, 0) == (5 * BLOCK, True))
    assert engine.connector.get_num_new_matched_tokens(request, 2 * BLOCK) == (3 * BLOCK, True)
    assert engine.connector.get_num_new_matched_tokens(request, 5 * BLOCK) == (0, False)
    assert engine.connector.get_num_new_matched_tokens(request, BLOCK) == (4 * BLOCK, True)
    engine.run()
    assert [(job.first, len(job.blocks)) for job in engine.load_jobs] == [(0, 5)]
    assert engine.outputs[name] == engine.expected_output(name, 2)


def test_a_request_that_does_not_fit_asks_again(engines, tokens):
    """V36: with a positive answer but no blocks there is no allocation; it is loaded when there are blocks."""
    prompt = tokens(8 * BLOCK + 1)
    saved(engines, prompt)
    engine = engines.start(Shape(blocks=14), save_pinned_fraction=1)
    other = engine.add(tokens(6 * BLOCK), BLOCK)
    engine.run(lambda: engine.outputs[other])
    name = engine.add(prompt, 2)
    engine.run()
    assert len(engine.load_jobs) == 1
    assert engine.outputs[name] == engine.expected_output(name, 2)


def test_prompt_logprobs_discard_the_answer(engines, tokens):
    """V37: every position must be computed; nothing is loaded, and the lease is let go."""
    prompt = tokens(3 * BLOCK + 1)
    saved(engines, prompt)
    engine = engines.start()
    name = engine.generate(prompt, 2, sampling={"prompt_logprobs": 1})
    assert engine.recomputed[name] == 3 * BLOCK + 1 + 1
    assert not engine.load_jobs
    assert engine.outputs[name] == engine.expected_output(name, 2)


@pytest.mark.parametrize("asked", [False, True])
def test_asked_then_aborted_before_allocation(engines, tokens, leases, asked):
    """V38: no allocation was ever made; no state is left, not even when the lookup's answer comes later."""
    given, released = leases
    prompt = tokens(3 * BLOCK + 1)
    saved(engines, prompt)
    held = engines.hold(Keyspace, "match")
    engine = engines.start()
    name = engine.add(prompt)
    eventually(lambda: held.callers == 1)
    if asked:
        assert engine.connector.get_num_new_matched_tokens(engine.requests[name], 0) == (None, False)
    engine.abort(name)
    held.open()
    eventually(lambda: len(given) == 1)
    engine.add(tokens(3))
    engine.drain()
    engine.run(lambda: bool(engine.step()) and released == given)


def test_a_finished_request_that_was_never_asked_about(engines, tokens):
    """Known to the scheduler's half only by its end, or not at all."""
    engine = engines.build()
    name = engine.add(tokens(2 * BLOCK), 2)  # before the handshake: the pool is not open
    engine.connect()
    engine.run()
    assert engine.outputs[name] == engine.expected_output(name, 2)


def test_the_circuit_breaker_stops_asking(engines, tokens, monkeypatch):
    """Several failures in a row: no lookup and no save for a moment, then one call tries."""
    engine = engines.start()
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(Keyspace, "match", lambda self, hashes, **options: asked.append(1) or _down())
        patch.setattr(Keyspace, "reserve", lambda self, hashes, **options: asked.append(1) or _raise_down())
        for _ in range(calls.FAILURES_MAX):
            engine.generate(tokens(BLOCK + 1))
        assert not engine.half._calls.available()
        before = len(asked)
        name = engine.generate(tokens(2 * BLOCK), 2)
        assert engine.outputs[name] == engine.expected_output(name, 2)
        assert len(asked) == before
    assert engine.count("lookup_failures") >= 1
    eventually(lambda: time.monotonic() >= engine.half._calls._breaker._closed_until_s)
    name = engine.generate(tokens(2 * BLOCK))
    assert engines.in_pool(engine, name) == 2
    assert engine.half._calls.available()


def test_a_slow_pool_is_not_offered(engines, tokens):
    """The gate: loading is measured to be slower than computing, so nothing is loaded; forgotten, it is tried again."""
    prompt = tokens(3 * BLOCK + 1)
    saved(engines, prompt)
    engine = engines.start()
    engine.half._gate.load.measured(gate.LOAD_BYTES_MIN, 1_000.0)
    engine.half._gate.prefill.measured(gate.PREFILL_TOKENS_MIN, 0.001)
    engine.generate(prompt)
    assert not engine.load_jobs
    assert engine.count("gated_tokens") == 3 * BLOCK
    engine.half._gate.load._measured_s = float("-inf")
    engine.scheduler.reset_prefix_cache()
    engine.generate(prompt)
    assert engine.count("load_tokens") == 3 * BLOCK


def test_the_gate_measures_both_rates(engines, tokens):
    """Prefill steps and loads of the engine itself are what it decides by."""
    prompt = tokens(40 * BLOCK + 1)
    shape = Shape(heads=16, head_size=64, blocks=128, batched_tokens=512)
    engine = engines.start(shape)
    engine.generate(prompt)
    assert engine.half._gate.prefill.now() is not None
    engine = engines.start(shape)
    engine.generate(prompt)
    assert engine.half._gate.load.now() is not None


def test_salts_keep_chains_apart(engines, tokens):
    """A salt chosen by a client: only requests with the same one share blocks."""
    prompt = tokens(3 * BLOCK + 1)
    engine = engines.start()
    engine.generate(prompt, cache_salt="theirs")
    engine = engines.start()
    engine.generate(prompt, cache_salt="ours")
    engine.generate(prompt)
    assert not engine.load_jobs
    engine = engines.start()
    name = engine.generate(prompt, 2, cache_salt="theirs")
    assert engine.count("load_tokens") == 3 * BLOCK
    assert engine.outputs[name] == engine.expected_output(name, 2)


def test_a_pool_that_is_not_there(engines, tokens):
    """No pool answers at all: the engine runs as without one."""
    engine = engines.build(pool="grpc://127.0.0.1:9")
    engine.shake_hands()
    name = engine.generate(tokens(3 * BLOCK), 2)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.count("hook_failures") == 0


def test_a_hook_that_fails_is_a_miss(engines, tokens, monkeypatch):
    """Whatever is raised inside: counted, and the engine goes on."""
    engine = engines.start()
    monkeypatch.setattr(type(engine.half.book), "wants_lookup", _raise_down)
    name = engine.generate(tokens(3 * BLOCK), 2)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.count("hook_failures") >= 1


def _down():
    from kvpool import Match, MissReason

    return Match(0, MissReason.NODE_DOWN, asked=False)


def _raise_down(*args, **options):
    from kvpool.core.errors import UnavailableError

    raise UnavailableError("made to fail")
