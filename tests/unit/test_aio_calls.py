"""Calls of the asyncio client that wait for a thread: their deadlines go on meanwhile."""

import asyncio
import threading

import pytest
from framed_peer import LONG_S

from kvpool.client import aio
from kvpool.client.aio import LATE_S, _Calls


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(aio, "THREADS", 1)
    calls = _Calls(LONG_S)
    yield calls
    calls.close()


def test_a_call_that_gets_no_thread_ends_by_its_deadline(calls):
    begun, go_on = threading.Event(), threading.Event()

    def hold(timeout_s):
        begun.set()
        return go_on.wait(timeout_s)

    async def both():
        held = asyncio.create_task(calls.make(hold))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        late = await calls.make(lambda timeout_s: timeout_s, timeout_s=0.05)
        go_on.set()
        return late, await held

    assert asyncio.run(both()) == (LATE_S, True)


def test_the_time_that_a_call_waited_is_of_its_own(calls):
    async def ask():
        return await calls.make(lambda timeout_s: timeout_s, timeout_s=1.0)

    assert 0 < asyncio.run(ask()) <= 1.0


@pytest.mark.parametrize("timeout_s", [0, -1.0, "soon"])
def test_a_deadline_that_cannot_be_is_for_the_call_to_refuse(calls, timeout_s):
    async def ask():
        return await calls.make(lambda timeout_s: timeout_s, timeout_s=timeout_s)

    assert asyncio.run(ask()) == timeout_s
