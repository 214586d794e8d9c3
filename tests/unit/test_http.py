"""The HTTP pages: three paths, GET, and no client that can keep the others from them."""

import socket
import threading
from http import HTTPStatus

import pytest
from http_pages import ask
from prometheus_client import CollectorRegistry
from waiting import eventually

from kvpool.core.errors import CapacityError
from kvpool.ops import http
from kvpool.ops.http import HttpServer, Page, role_pages


@pytest.fixture
def serve():
    """Starts a server of the given pages; its address."""
    servers = []

    def start(pages):
        servers.append(HttpServer(pages))
        return servers[-1].start("127.0.0.1", 0)

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def state():
    return {"alive": True, "unready": ""}


@pytest.fixture
def address(serve, state):
    return serve(role_pages(CollectorRegistry(), lambda: state["alive"], lambda: state["unready"]))


def hello():
    return Page(HTTPStatus.OK, b"hello")


def exchange(address, *parts):
    """Send raw bytes; everything that comes back before the connection ends."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        for part in parts:
            sock.sendall(part)
        received = b""
        while data := sock.recv(65_536):
            received += data
    return received


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:7302", 200),
        ("127.0.0.1:7302", 200),
        ("[::1]:7302", 200),
        ("[::1]", 200),
        ("evil.example", 421),
        ("evil.example:7302", 421),
        ("127.0.0.1.evil.example:7302", 421),
        ("10.0.0.1:7302", 421),
    ],
)
def test_on_loopback_a_request_must_mean_this_host(address, host, status):
    """A page of others may give its own name this host's address, and would then read what is here as its own."""
    answer = exchange(address, f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())

    assert answer.split()[1] == str(status).encode()
    assert b"evil" not in answer


def test_alive_and_ready_are_told_apart(address, state):
    state["unready"] = "no node is ready"

    assert ask(address, "/healthz")[:2] == (200, "ok\n")
    assert ask(address, "/readyz")[:2] == (503, "no: no node is ready\n")
    state.update(alive=False, unready="")
    assert ask(address, "/healthz").status == 503
    assert ask(address, "/readyz").status == 200


def test_metrics_come_as_prometheus_reads_them(address):
    answer = ask(address, "/metrics")

    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics?name[]=x", "/../etc/passwd", "/%2e%2e/etc/passwd", "*"])
def test_no_other_path_leads_anywhere(address, path):
    answer = ask(address, path)

    assert answer.status == 404
    assert answer.text == "404 Not Found: GET one of /healthz, /readyz, /metrics\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"])
def test_get_is_all_there_is(address, method):
    answer = ask(address, "/metrics", method)

    assert answer.status == 405
    assert answer.headers["Allow"] == "GET"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /healthz HTTP/9.9\r\n\r\n", b"505"),
        (b"<script> HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_requests_that_cannot_be_are_refused_and_nothing_of_them_comes_back(address, request_bytes, status):
    answer = exchange(address, request_bytes)

    assert answer.split()[1] == status
    assert b"script" not in answer
    assert ask(address, "/healthz").status == 200


def test_a_client_that_sends_byte_after_byte_is_ended_at_its_time(serve, monkeypatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.2)
    address = serve({"/": hello})
    host, port = address.split(":")
    pause = threading.Event()

    def drip(sock):
        while True:  # ends when the server has closed
            sock.sendall(b"x")
            pause.wait(0.01)

    with socket.create_connection((host, int(port)), timeout=10) as sock, pytest.raises(OSError):  # noqa: PT011
        drip(sock)


def test_a_client_that_takes_no_answer_is_ended_at_its_time(serve, monkeypatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.2)
    large = b"x" * (64 << 20)  # more than sockets hold
    asked = threading.Event()

    def page():
        asked.set()
        return Page(HTTPStatus.OK, large)

    address = serve({"/": page})
    host, port = address.split(":")

    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert asked.wait(10)
        eventually(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))
        received = 0
        while data := sock.recv(1 << 20):
            received += len(data)

    assert 0 < received < len(large)


def test_beyond_the_limit_connections_are_closed_and_places_come_back(serve, monkeypatch):
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 2)
    inside, leave = threading.Semaphore(0), threading.Event()

    def wait():
        inside.release()
        leave.wait(10)
        return hello()

    address = serve({"/wait": wait, "/": hello})
    waiting = [threading.Thread(target=ask, args=(address, "/wait")) for _ in range(2)]
    for thread in waiting:
        thread.start()
        assert inside.acquire(timeout=10)

    with pytest.raises(OSError):  # noqa: PT011
        ask(address, "/")
    leave.set()
    for thread in waiting:
        thread.join()

    assert ask(address, "/").text == "hello"


def test_a_page_that_fails_costs_its_client_the_answer_and_nobody_else(serve):
    def fail():
        raise LookupError("a defect")

    address = serve({"/fail": fail, "/": hello})

    assert exchange(address, b"GET /fail HTTP/1.0\r\n\r\n") == b""
    assert ask(address, "/").text == "hello"


def test_a_port_in_use_is_one_line_with_a_fix(address):
    port = int(address.split(":")[1])

    with pytest.raises(CapacityError, match=rf"cannot listen on 127.0.0.1:{port}: .*; choose another --http-port"):
        HttpServer({}).start("127.0.0.1", port)


def test_stopping_one_that_never_started_is_nothing():
    HttpServer({}).stop()


def test_pages_are_served_over_ipv6_too():
    server = HttpServer({"/": hello})
    address = server.start("::1", 0)
    try:
        assert ask(address, "/").text == "hello"
    finally:
        server.stop()
