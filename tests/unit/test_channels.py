"""When a failed call is worth a second look at the server that it failed on."""

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
