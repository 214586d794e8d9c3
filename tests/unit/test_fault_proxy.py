"""The fault proxy does what it says, and nothing is left of it."""

import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from framed_peer import LONG_S, receive, wait_until_closed

from kvpool.testing import FaultProxy, Faults
from kvpool.transport.wire.connection import split_address


@pytest.fixture
def echo():
    """A server that sends back what it gets, and ends when its client does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = []

        def serve(sock):
            with sock:
                try:
                    while data := sock.recv(1 << 16):
                        sock.sendall(data)
                except OSError:
                    pass

        def accept():
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=serve, args=(sock,)))
                threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join()


@pytest.fixture
def proxy(echo):
    with FaultProxy("127.0.0.1", echo) as proxy:
        yield proxy


@contextmanager
def dialled(proxy):
    with socket.create_connection(split_address(proxy.address), LONG_S) as sock:
        yield sock


def answer(sock, data):
    sock.sendall(data)
    return receive(sock, len(data))


@pytest.mark.parametrize(
    "faults",
    [Faults(), Faults(latency_s=0.001), Faults(slice_bytes=7), Faults(bytes_per_s=1e6), Faults(close_delay_s=0.001)],
)
def test_what_passes_is_what_was_sent(proxy, faults):
    proxy.suffer(to_server=faults, to_client=faults)
    data = bytes(range(256)) * 16
    with dialled(proxy) as sock:
        assert answer(sock, data) == data
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert proxy.connections == 1


def test_a_stalled_direction_is_silent_until_it_is_not(proxy):
    proxy.suffer(to_client=Faults(stalled=True))
    with dialled(proxy) as sock:
        sock.sendall(b"late")
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(LONG_S)
        proxy.suffer()
        assert receive(sock, 4) == b"late"


def test_a_connection_is_reset_after_its_last_byte(proxy):
    proxy.suffer(to_client=Faults(limit_bytes=3))
    with dialled(proxy) as sock:
        sock.sendall(b"whole")
        assert len(receive_all(sock)) <= 3


def receive_all(sock):
    data = b""
    try:
        while chunk := sock.recv(16):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def test_a_reset_ends_connections_and_new_ones_work(proxy):
    with dialled(proxy) as sock:
        assert answer(sock, b"one") == b"one"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            wait_until_closed(sock)
    with dialled(proxy) as sock:
        assert answer(sock, b"two") == b"two"


def test_down_refuses_and_up_listens_at_the_same_address(proxy):
    address = proxy.address
    proxy.down()
    with pytest.raises(ConnectionRefusedError), dialled(proxy):
        pass
    proxy.up()
    assert proxy.address == address
    with dialled(proxy) as sock:
        assert answer(sock, b"back") == b"back"


def test_a_server_that_is_not_there_resets_the_client(proxy, echo):
    with FaultProxy("127.0.0.1", 1) as nowhere:
        with suppress(ConnectionResetError), dialled(nowhere) as sock:  # it may come before the dial has returned
            assert receive_all(sock) == b""
        assert nowhere.connections == 1
