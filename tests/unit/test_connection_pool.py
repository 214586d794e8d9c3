"""Pools of connections: one a caller, used again while they are sound."""

import threading
from contextlib import ExitStack

import pytest
from framed_peer import LONG_S, SOON_S, WELCOME, Peer, frame, receive_frame, wait_until_closed

from kvpool.core.errors import ClosedError, DeadlineError, UnavailableError
from kvpool.transport.pool import IDLE_MAX, ConnectionPool
from kvpool.transport.wire.messages import Done, Ping


@pytest.fixture
def peer(tmp_path):
    """Starts a peer; it is gone after the test."""
    peers = []

    def start(answer, **options):
        peers.append(Peer(tmp_path / f"peer-{len(peers)}", answer, **options))
        return peers[-1]

    yield start
    for started in peers:
        started.close()


@pytest.fixture
def pool(peer):
    """A pool of connections to a peer that answers each ping with the number of its connection."""
    numbers = iter(range(1, 100))

    def answer(sock):
        number, correlation = next(numbers), 2
        while receive_frame(sock):
            sock.sendall(frame(Done(number), correlation))
            correlation += 1

    made = ConnectionPool(peer(answer).uri, "me", WELCOME.incarnation)
    yield made
    made.close()


def ping(connection, timeout_s=LONG_S):
    return connection.call(Ping(), Done, timeout_s).count


def ask(pool):
    with pool.connection(LONG_S) as connection:
        return ping(connection)


def test_a_connection_is_used_again(pool):
    assert [ask(pool) for _ in range(3)] == [1, 1, 1]


def test_callers_at_the_same_time_have_connections_of_their_own(pool):
    with pool.connection(LONG_S) as first, pool.connection(LONG_S) as second:
        assert {ping(first), ping(second)} == {1, 2}


def test_a_broken_connection_is_not_lent_again(pool):
    with pool.connection(LONG_S) as connection:
        assert ping(connection) == 1
        connection.close()

    assert ask(pool) == 2


def test_a_connection_with_replies_outstanding_is_not_lent_again(pool):
    assert ask(pool) == 1  # the peer's thread numbers its connection when it comes to it
    with pool.connection(LONG_S) as connection:
        connection.post(Ping(), LONG_S)

    assert connection.closed
    assert ask(pool) == 2


def test_a_reply_that_comes_after_its_caller_gave_up_reaches_nobody_else(peer):
    gave_up = threading.Event()
    numbers = iter((1, 2))

    def answer(sock):
        number = next(numbers)
        receive_frame(sock)
        if number == 1:
            gave_up.wait(LONG_S)
        sock.sendall(frame(Done(number)))
        wait_until_closed(sock)

    pool = ConnectionPool(peer(answer).uri, "me")
    with pool.connection(LONG_S) as connection, pytest.raises(DeadlineError):
        ping(connection, SOON_S)
    gave_up.set()

    assert ask(pool) == 2
    pool.close()


def test_only_so_many_idle_connections_are_kept(pool):
    with ExitStack() as stack:
        lent = [stack.enter_context(pool.connection(LONG_S)) for _ in range(IDLE_MAX + 2)]

    assert sum(connection.closed for connection in lent) == 2


def test_another_process_at_the_address_is_unavailable(peer):
    stranger = peer(wait_until_closed)

    with (
        pytest.raises(UnavailableError, match="another process answers"),
        ConnectionPool(stranger.uri, "me", 8).connection(LONG_S),
    ):
        pass


def test_a_closed_pool_lends_nothing_and_closes_what_comes_back(pool):
    ask(pool)
    with pool.connection(LONG_S) as lent:
        pool.close()
        assert ping(lent) == 1

    assert lent.closed
    with pytest.raises(ClosedError), pool.connection(LONG_S):
        pass
