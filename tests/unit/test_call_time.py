"""One time-out bounds all parts of a call: dialling and greeting, sending and receiving."""

import socket
from types import SimpleNamespace

import pytest

from kvpool.core.errors import DeadlineError
from kvpool.testing import ManualClock
from kvpool.transport.wire import connection as wire
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.framed import FramedSocket
from kvpool.transport.wire.messages import PROTOCOL_VERSION, Done, Ping, Welcome

TIMEOUT_S = 5.0
SLOW_S = 3.0


class SlowSocket(FramedSocket):
    """Each send takes ``send_s``, and no answer ever comes."""

    send_s = 0.0

    def send(self, message, correlation, deadline_ms=0, payload=()):
        wire.time.monotonic.advance(self.send_s)

    def receive_header(self):
        wire.time.monotonic.advance(max(0.0, self.until_s - wire.time.monotonic()))
        raise BlockingIOError


@pytest.fixture
def clock(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(wire, "FramedSocket", SlowSocket)
    return clock


def dial_in(clock, monkeypatch, seconds):
    def dial(uri, timeout_s):
        clock.advance(seconds)
        return socket.socket(socket.AF_UNIX)

    monkeypatch.setattr(wire, "_dial", dial)


@pytest.mark.parametrize("dial_s", [0.0, SLOW_S])
def test_a_slow_dial_leaves_the_greeting_the_rest(clock, monkeypatch, dial_s):
    dial_in(clock, monkeypatch, dial_s)
    began_s = clock()
    with pytest.raises(DeadlineError):
        Connection("unix:///nobody", "test", TIMEOUT_S)
    assert clock() == pytest.approx(began_s + TIMEOUT_S)


def test_a_slow_send_leaves_the_answer_the_rest(clock, monkeypatch):
    dial_in(clock, monkeypatch, 0.0)
    with monkeypatch.context() as greeted:
        greeted.setattr(Connection, "collect", lambda *_: Welcome(PROTOCOL_VERSION, "n", 1))
        connection = Connection("unix:///nobody", "test", TIMEOUT_S)
    monkeypatch.setattr(SlowSocket, "send_s", SLOW_S)
    began_s = clock()
    with pytest.raises(DeadlineError):
        connection.call(Ping(), Done, TIMEOUT_S)
    assert clock() == pytest.approx(began_s + TIMEOUT_S)
