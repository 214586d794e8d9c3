"""The scheduler's calls to the pool: what counts as a failure, and who may call after several."""

import threading
from types import SimpleNamespace

import pytest

from kvpool import KvpoolError, Match, MissReason, UnavailableError
from kvpool.ops.tracing import Tracer
from kvpool_connector.vllm import calls as module
from kvpool_connector.vllm.calls import FAILURES_MAX, PAUSE_S, Answered, PoolCalls
from tests.waiting import eventually

LOST = Match(0, MissReason.NODE_DOWN)
AWAY = Match(0, MissReason.NODE_DOWN, asked=False)


class Pool:
    """A keyspace that answers what it is told to."""

    tracer = Tracer()

    def __init__(self) -> None:
        self.answer: Match | KvpoolError = Match(0, MissReason.COLD)

    def match(self, hashes, **options):
        return self.answer

    def reserve(self, hashes, **options):
        if isinstance(self.answer, KvpoolError):
            raise self.answer
        return self.answer


@pytest.fixture
def now(monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def calls(pool, now):
    made = PoolCalls(SimpleNamespace(keyspace=pool), lease_s=1, lookup_timeout_s=1, call_timeout_s=1)
    yield made
    made.close()


def look_up(calls) -> bool:
    calls.look_up("r", 1, bytes(32))
    return calls.answers.get(timeout=10).failed


def fail(calls, pool) -> None:
    pool.answer = AWAY
    assert all(look_up(calls) for _ in range(FAILURES_MAX))


def test_blocks_that_the_pool_has_lost_are_no_failure_of_the_pool(calls, pool):
    pool.answer = LOST
    assert not any(look_up(calls) for _ in range(FAILURES_MAX + 1))
    assert calls.available()


def test_after_several_failures_one_call_tries_after_a_pause(calls, pool, now):
    fail(calls, pool)
    assert not calls.available()
    now.now_s += PAUSE_S
    assert calls.available()
    assert not calls.available(), "the others wait for how it ends"
    pool.answer = Match(1, None)
    assert not look_up(calls)
    assert calls.available()


def test_what_is_queued_behind_the_call_that_tries_may_go(calls, pool, now):
    fail(calls, pool)
    assert not calls.available(queued=True), "nothing tries"
    now.now_s += PAUSE_S
    assert calls.available(queued=True)
    assert calls.available(queued=True)
    pool.answer = UnavailableError("away")
    calls.reserve(1, bytes(32), 0)
    assert calls.reservations.get(timeout=10).reservation is None
    assert not calls.available(queued=True), "it has failed"


def test_calls_that_would_wait_behind_too_many_fail_at_once(calls, monkeypatch):
    calls.close()
    monkeypatch.setattr(module, "WAITING_MAX", 1)
    full = PoolCalls(SimpleNamespace(keyspace=None), lease_s=1, lookup_timeout_s=1, call_timeout_s=1)
    begun, go_on = threading.Event(), threading.Event()

    def hold():
        begun.set()
        go_on.wait(10)

    for waiting in (full._lookups, full._others):
        assert waiting.submit(hold)
        assert begun.wait(10)
        begun.clear()
    full.look_up("r", 3, bytes(32))
    full.reserve(4, bytes(32), 0)
    full.release(1)

    assert full.answers.get(timeout=10) == Answered("r", 3, 0, 0, 0.0, failed=True)
    assert full.reservations.get(timeout=10).number == 4
    go_on.set()
    full.close()


def test_nothing_is_asked_of_a_pool_that_was_never_reached(pool):
    calls = PoolCalls(SimpleNamespace(keyspace=None), lease_s=1, lookup_timeout_s=1, call_timeout_s=1)
    assert not calls.available(queued=True)
    calls.reserve(1, bytes(32), 0)
    assert calls.reservations.get(timeout=10).reservation is None
    calls.close()
    eventually(lambda: calls._others._executor._shutdown)
