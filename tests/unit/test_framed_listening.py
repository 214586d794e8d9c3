"""Where a framed server listens, and how many it lets in."""

import os
import resource
import socket
import stat
from contextlib import ExitStack

import pytest
from framed_peer import LONG_S
from scripted_server import Server, greet, on_tcp, raw, read_until_closed, running
from waiting import eventually

from kvpool.core.errors import CapacityError, OverloadedError
from kvpool.transport.wire.connection import Connection, split_address
from kvpool.transport.wire.messages import Done, Ping
from kvpool.transport.wire.server import REFUSALS_MAX


def test_connections_over_the_limit_are_told_why_and_counted():
    with running(on_tcp, connections_max=1) as (server, uri), raw(uri) as first:
        greet(first)
        with pytest.raises(OverloadedError, match="scripted serves 1 connections already; try again later"):
            Connection(uri, "me", LONG_S)
        assert server.refused_connections == 1

        first.close()
        assert server.sessions[0].ended.wait(LONG_S)
        eventually(lambda: not server.connections)
        with raw(uri) as third:
            greet(third)


def test_those_refused_who_say_nothing_are_closed_and_so_are_more_than_can_be_told():
    with running(on_tcp, connections_max=1) as (server, uri), raw(uri) as first, ExitStack() as stack:
        greet(first)
        silent = [stack.enter_context(raw(uri)) for _ in range(2 * REFUSALS_MAX)]
        for sock in silent:
            read_until_closed(sock)
        assert server.refused_connections == len(silent)
        assert len(server.sessions) == 1
        eventually(lambda: server.connections == 1)


def test_a_server_out_of_descriptors_serves_again_when_there_are_some():
    """The kernel has accepted the peer already: it waits, and is not lost."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(on_tcp) as (server, uri), socket.socket() as waiting:
        waiting.settimeout(LONG_S)
        spare = [os.dup(waiting.fileno()) for _ in range(8)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare[0], hard))
        try:
            while True:
                spare.append(os.dup(waiting.fileno()))
        except OSError:
            pass  # now none is free
        waiting.connect(split_address(uri.removeprefix("tcp://")))
        eventually(lambda: server.failed_accepts)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in spare:
            os.close(descriptor)

        greet(waiting)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_port_that_was_found_is_told(host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    with running(lambda server: server.listen_tcp(host, 0)) as (_, uri):
        connection = Connection(uri, "me", LONG_S)
        assert connection.call(Ping(), Done, LONG_S) == Done(1)
        connection.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no..such.host", "127.0.0.1"])
def test_an_address_that_cannot_be_listened_on_is_refused_with_the_fix(host):
    with running(on_tcp) as (_, uri):
        taken = int(uri.rpartition(":")[2])
        server = Server()
        with pytest.raises(CapacityError, match=f"cannot listen on {host}:.*; choose another address"):
            server.listen_tcp(host, taken)
        server.stop()


def test_only_this_user_may_open_the_unix_socket(tmp_path):
    mask = os.umask(0)
    try:
        with running(lambda server: server.listen_unix(tmp_path / "new" / "socket")):
            assert os.umask(0) == 0
            assert stat.S_IMODE((tmp_path / "new" / "socket").stat().st_mode) == 0o700
            assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    finally:
        os.umask(mask)


def test_the_socket_of_a_dead_server_is_replaced(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    with running(lambda server: server.listen_unix(path)) as (_, uri), raw(uri) as sock:
        greet(sock)


def test_the_socket_of_a_live_server_is_left_to_it(tmp_path):
    path = tmp_path / "socket"
    with running(lambda server: server.listen_unix(path)) as (_, uri):
        with pytest.raises(CapacityError, match=f"another server listens on {path}; stop it or choose another path"):
            Server().listen_unix(path)
        with raw(uri) as sock:
            greet(sock)


def test_a_file_that_is_no_socket_is_not_removed(tmp_path):
    path = tmp_path / "precious"
    path.write_bytes(b"data")

    with pytest.raises(CapacityError, match="is no socket; choose another path"):
        Server().listen_unix(path)
    assert path.read_bytes() == b"data"


@pytest.mark.parametrize("name", ["file/socket", "long" * 40], ids=["below a file", "too long"])
def test_a_path_that_cannot_be_listened_on_is_refused_with_the_fix(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(CapacityError, match="choose another"):
        Server().listen_unix(tmp_path / name)
