"""When a failed call is worth a second look at the server that it failed on."""

import threading

import grpc
import pytest

from kvpool.core.errors import AuthenticationError, UnavailableError
from kvpool.ops import channels
from kvpool.ops.channels import Channels


class Failed(grpc.RpcError):
    def __init__(self, details, code=grpc.StatusCode.UNAVAILABLE):
        self._details, self._code = details, code

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return ()


@pytest.fixture
def looked(monkeypatch):
    """The looks taken, each of which finds that there is TLS."""
    looks = []
    monkeypatch.setattr(channels, "why_refused", lambda *arguments: looks.append(arguments) or "it speaks TLS")
    return looks


@pytest.fixture
def channel():
    opened = Channels("127.0.0.1:1", None)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "details",
    [
        "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.7:7300: Socket closed",
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:7300: Tls handshake failed (TSI_X)",
    ],
)
def test_whoever_hangs_up_is_looked_at_for_as_long_as_there_is_time(channel, looked, details):
    assert type(channel.failure(Failed(details), 0.3)) is AuthenticationError
    assert looked == [("127.0.0.1:1", None, 0.3)]
    assert type(channel.failure(Failed(details), 0)) is UnavailableError
    assert len(looked) == 1


@pytest.mark.parametrize(
    "details",
    [
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:7300: Connection refused",
        "DNS resolution failed for nowhere.invalid:7300: C-ares status is not ARES_SUCCESS",
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:7300: connection attempt timed out",
        "Socket closed",
        "the connection broke",
    ],
)
def test_nothing_else_is_looked_at(channel, looked, details):
    """A name that nobody knows would take seconds more to be not known again."""
    assert type(channel.failure(Failed(details), 5)) is UnavailableError
    assert looked == []


@pytest.fixture
def three():
    opened = Channels("127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", None)
    yield opened
    opened.close()


def test_of_several_servers_the_next_one_is_taken(three):
    first = three.current()
    assert three.servers == 3
    taken = []
    for _ in range(4):
        taken.append(three._address)
        three.current()
        three.failure(Failed("nobody there"), 0.0)
    assert taken == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:1"]
    assert three.current() is not first


def test_calls_that_fail_on_the_same_server_leave_it_once(three):
    together = threading.Barrier(8)

    def fail():
        three.current()
        together.wait()
        three.failure(Failed("nobody there"), 0.0)

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert three._address == "127.0.0.1:2"


def test_what_a_server_answers_is_no_reason_to_leave_it(three):
    three.current()
    three.failure(Failed("too much to do", grpc.StatusCode.RESOURCE_EXHAUSTED), 0.0)
    three.failure(Failed("who are you", grpc.StatusCode.UNAUTHENTICATED), 0.0)
    assert three._address == "127.0.0.1:1"
