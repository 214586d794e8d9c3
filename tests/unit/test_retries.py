"""Retries: a small part of all calls, at times that nobody shares."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.retries import RetryBudget
from kvpool.transport import backoff
from kvpool.transport.backoff import Backoff, equal_jitter, full_jitter


def test_a_lone_failure_is_repeated_and_a_flood_is_not():
    budget = RetryBudget(share=0.1, burst=3)
    assert [budget.allows() for _ in range(5)] == [True, True, True, False, False]
    assert (budget.retries, budget.denied) == (3, 2)


def test_calls_earn_retries_one_in_ten():
    budget = RetryBudget(share=0.1, burst=1)
    assert budget.allows()
    for _ in range(9):
        budget.called()
    assert not budget.allows()
    for _ in range(2):
        budget.called()
    assert budget.allows()


@given(st.lists(st.booleans(), max_size=200), st.floats(0.01, 1), st.integers(0, 20))
def test_retries_never_exceed_the_burst_and_the_share(calls, share, burst):
    budget = RetryBudget(share, burst)
    made = 0
    for is_call in calls:
        if is_call:
            made += 1
            budget.called()
        else:
            budget.allows()
        assert budget.retries <= burst + share * made + 1e-9


@pytest.fixture
def draws(monkeypatch):
    """What the next pauses are drawn as, from 0 to 1."""
    drawn = []
    monkeypatch.setattr(backoff.random, "random", lambda: drawn.pop(0))
    return drawn


def test_pauses_double_up_to_their_limit_and_begin_anew(draws):
    pauses = Backoff(0.2, 1.0)
    draws += [1.0] * 6
    assert [pauses.next_s() for _ in range(4)] == [0.2, 0.4, 0.8, 1.0]
    pauses.reset()
    assert pauses.next_s() == 0.2


def test_full_jitter_reaches_down_to_nothing_and_equal_jitter_to_the_half(draws):
    draws += [0.0, 1.0, 0.0, 1.0]
    assert (full_jitter(2.0), full_jitter(2.0)) == (0.0, 2.0)
    assert (equal_jitter(2.0), equal_jitter(2.0)) == (2.0, 1.0)


def test_those_who_failed_together_come_back_apart():
    random.seed(1)
    firsts = sorted(Backoff(0.2, 1.0).next_s() for _ in range(1000))
    buckets = [sum(i / 50 <= first < (i + 1) / 50 for first in firsts) for i in range(10)]
    assert all(50 < count < 200 for count in buckets)
