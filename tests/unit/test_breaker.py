"""The circuit breaker: a dead peer is left alone, and found again by one call."""

import pytest

from kvpool.client.breaker import Breaker
from kvpool.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def breaker(clock):
    return Breaker(clock, failures_max=3, pause_s=1.0, jitter=lambda most_s: most_s)


def fail(breaker, times):
    for _ in range(times):
        breaker.failed()


def test_calls_are_allowed_until_the_last_failure_in_a_row(breaker):
    fail(breaker, 2)
    assert breaker.allows()

    fail(breaker, 1)
    assert not breaker.allows()


def test_a_success_forgets_earlier_failures(breaker):
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)

    assert breaker.allows()


def test_after_the_pause_one_caller_tries_and_the_others_wait(breaker, clock):
    fail(breaker, 3)
    clock.advance(1.0)

    assert [breaker.allows() for _ in range(3)] == [True, False, False]


def test_the_pause_begins_anew_when_the_trial_fails(breaker, clock):
    fail(breaker, 3)
    clock.advance(1.0)
    breaker.allows()
    clock.advance(0.9)
    breaker.failed()
    clock.advance(0.9)

    assert not breaker.allows()


def test_all_are_allowed_when_the_trial_succeeds(breaker, clock):
    fail(breaker, 3)
    clock.advance(1.0)
    breaker.allows()
    breaker.succeeded()

    assert [breaker.allows() for _ in range(3)] == [True, True, True]


def test_a_trial_that_never_ends_does_not_keep_the_peer_away_for_ever(breaker, clock):
    fail(breaker, 3)
    clock.advance(1.0)
    breaker.allows()
    clock.advance(1.0)

    assert breaker.allows()
