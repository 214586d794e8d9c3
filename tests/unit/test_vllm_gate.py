"""Load or recompute: what is measured, and what follows from it."""

import pytest
from kvpool_connector.vllm.gate import STALE_S, STEPS_MAX, Gate, StepTimer

from kvpool.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1.0)


@pytest.fixture
def gate(clock: ManualClock) -> Gate:
    return Gate(clock, block_bytes=1 << 20, block_tokens=16)


def test_every_load_is_offered_until_both_rates_are_known(gate: Gate) -> None:
    assert gate.worth_loading(1)
    gate.load.measured(10 << 20, 100.0)
    assert gate.worth_loading(1)


def test_a_load_is_offered_where_it_is_faster(gate: Gate) -> None:
    gate.load.measured(100 << 20, 1.0)  # 100 blocks/s
    gate.prefill.measured(16_000, 100.0)  # 10 blocks/s
    assert gate.worth_loading(5)


def test_a_load_is_not_offered_where_computing_is_faster(gate: Gate, clock: ManualClock) -> None:
    gate.load.measured(10 << 20, 1.0)
    gate.prefill.measured(16_000, 10.0)  # 100 blocks/s
    assert not gate.worth_loading(5)
    clock.advance(STALE_S)
    assert gate.worth_loading(5), "what is not known any more is tried again"


def test_small_loads_and_steps_are_not_measured(gate: Gate) -> None:
    gate.load.measured(1, 100.0)
    gate.prefill.measured(1, 100.0)
    assert (gate.load.now(), gate.prefill.now()) == (None, None)


def test_rates_follow_what_is_measured(gate: Gate) -> None:
    for _ in range(30):
        gate.load.measured(10 << 20, 1.0)
    gate.load.measured(20 << 20, 1.0)
    assert 10 << 20 < gate.load.now() < 20 << 20


def test_steps_in_flight_are_timed_one_after_the_other(clock: ManualClock) -> None:
    timer = StepTimer(clock)
    first, second = timer.sent(1000), timer.sent(2000)
    clock.advance(1)
    assert timer.came_back(first) == (1000, 1.0)
    clock.advance(3)
    assert timer.came_back(second) == (2000, 3.0), "it began when the one before it had ended"
    assert timer.came_back(second) == (0, 0.0)


def test_small_steps_are_not_timed_and_lost_ones_are_forgotten(clock: ManualClock) -> None:
    timer = StepTimer(clock)
    assert timer.sent(1) == 0
    lost = timer.sent(1000)
    for _ in range(STEPS_MAX):
        timer.sent(1000)
    assert timer.came_back(lost) == (0, 0.0)
