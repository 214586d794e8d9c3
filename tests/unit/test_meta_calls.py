"""Calls to the metadata service that fail: which are made again, and what they say of the service to other calls."""

import threading

import pytest
from framed_peer import LONG_S
from waiting import eventually

from kvpool.client import meta as module
from kvpool.client.meta import MetaClient
from kvpool.client.retries import BURST
from kvpool.core.errors import (
    DeadlineError,
    OverloadedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvpool.transport.deadline import Deadline
from kvpool.transport.once import OpenOnce
from kvpool.transport.wire.messages import Done, Ping


class Calls(MetaClient):
    """A client whose calls end as they are told to, one after the other, and then answer."""

    def __init__(self, *ends):
        super().__init__("grpc://127.0.0.1:1", "me")
        self.ends = list(ends)
        self.made = 0

    def find(self, deadline):
        self.made += 1
        if self.ends:
            raise self.ends.pop(0)
        return Answering()


class Answering:
    """Connections, to somebody who answers."""

    def connection(self, timeout_s):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None

    def call(self, request, reply_type, timeout_s):
        return Done(1)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    opened = []

    def make(*ends):
        opened.append(Calls(*ends))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


def ask(client, again=True, timeout_s=LONG_S):
    return client.call(Ping(), Done, Deadline(timeout_s), again=again)


def test_a_call_that_found_nobody_is_made_once_more(calls):
    client = calls(UnavailableError("gone"))
    assert ask(client) == Done(1)
    assert (client.made, client.budget.retries) == (2, 1)


@pytest.mark.parametrize("error", [OverloadedError("full"), DeadlineError("late"), UnknownNamespaceError("new")])
def test_where_asking_again_cannot_help_it_is_not(calls, error):
    client = calls(error)
    with pytest.raises(type(error)):
        ask(client)
    assert (client.made, client.budget.retries) == (1, 0)


def test_what_must_not_be_made_twice_is_not(calls):
    client = calls(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        ask(client, again=False)
    assert client.made == 1


def test_when_the_budget_is_used_up_calls_fail_at_once(calls, monkeypatch):
    client = calls(*[UnavailableError("gone")] * 100)
    monkeypatch.setattr(client._breaker, "allows", lambda: True)
    for _ in range(30):
        with pytest.raises(UnavailableError):
            ask(client)
    assert BURST <= client.budget.retries <= BURST + 3
    assert client.budget.retries + client.budget.denied == 30
    assert client.made == 30 + client.budget.retries


@pytest.mark.parametrize("answer", [OverloadedError("full"), UnknownNamespaceError("restarted")])
def test_any_answer_closes_the_circuit(calls, answer):
    client = calls(*[UnavailableError("gone")] * 4, answer)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            ask(client)
    with pytest.raises(UnavailableError, match="did not answer lately"):
        ask(client)
    eventually(client._breaker.allows)
    with pytest.raises(type(answer)):
        client._call_once(Ping(), Done, Deadline(LONG_S))
    assert ask(client) == Done(1)


def test_of_many_who_saw_one_pool_fail_none_closes_the_next_one():
    closed = []
    once = OpenOnce("it", closed.append)
    first = once.get("pool", object, Deadline(LONG_S))
    once.drop("pool", first)
    second = once.get("pool", object, Deadline(LONG_S))

    others = [threading.Thread(target=once.drop, args=("pool", first)) for _ in range(3)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()

    assert once.get("pool", object, Deadline(LONG_S)) is second
    assert closed == [first]
    once.close()
