"""The HTTP pages of a service: `/healthz`, `/readyz`, `/metrics`, and what it adds; GET, fixed paths, nothing else.

The standard library's server is enough for that: it parses requests as it has for decades, and brings no event loop
and no framework into a process that has neither. What it lacks is added here: a limit of connections, and a time by
which a client has sent its request and taken the answer. Where others than this host's processes can come, it speaks
TLS, and all but health is for operators, by certificate or token.
"""

import io
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from kvpool.core.access import OPEN_PAGES, require_pages
from kvpool.core.errors import AuthenticationError, CapacityError, ForbiddenError
from kvpool.ops.addresses import shown_host
from kvpool.ops.authentication import Authenticator, bearer_token
from kvpool.ops.handshakes import peer_identities
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import is_loopback

CONNECTIONS_MAX = 16
"""Served at a time; more are closed."""

REQUEST_S = 2.0
"""Time that a client has to send its request, and then as much again to take the answer."""

BACKLOG = 64
ACCEPT_PAUSE_S = 0.1
"""Between attempts to accept while that fails: no descriptor is free, say."""

PLAIN = "text/plain; charset=utf-8"

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """What a path answers with."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: Mapping[str, str] = field(default_factory=dict)


Pages = dict[str, Callable[[], Page]]


def role_pages(registry: CollectorRegistry, is_alive: Callable[[], bool], unready: Callable[[], str]) -> Pages:
    """The three pages of a role.

    Args:
        registry: What ``/metrics`` shows.
        is_alive: False when only a restart can help; must not wait for anything.
        unready: Why the role should get no work now; empty when it should.
    """

    def healthz() -> Page:
        return _verdict("" if is_alive() else "a part of the process has ended; restart it")

    def readyz() -> Page:
        return _verdict(unready())

    def metrics() -> Page:
        return Page(HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)

    return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}


class HttpServer:
    """Serves some pages; `stop` when nothing of it is left.

    Args:
        pages: By path.
        authenticator: Who may see them, over TLS, all but health; None: anybody, in plaintext.
    """

    def __init__(self, pages: Pages, authenticator: Authenticator | None = None) -> None:
        self._pages = pages
        self._authenticator = authenticator
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def scheme(self) -> str:
        """What its URI begins with."""
        return "http" if self._authenticator is None else "https"

    def start(self, host: str, port: int) -> str:
        """Listen and serve; returns ``host:port``. Raises CapacityError when the address cannot be had."""
        shown = shown_host(host)
        try:
            self._server = _Server((host, port), self._pages, self._authenticator)
        except (OSError, UnicodeError) as error:
            raise CapacityError(f"cannot listen on {shown}:{port}: {error}; choose another --http-port") from error
        self._thread = threading.Thread(target=self._server.serve, name="kvpool-http", daemon=True)
        self._thread.start()
        return f"{shown}:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Close the listener and wait for its threads: a client is waited for no longer than it is served."""
        if self._server is not None and self._thread is not None:
            self._server.wake()
            self._thread.join()
            self._server.server_close()
            self._server = None


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = False  # so that closing waits for them
    request_queue_size = BACKLOG

    def __init__(self, address: tuple[str, int], pages: Pages, authenticator: Authenticator | None) -> None:
        self.authenticator = authenticator
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        self.for_this_host = is_loopback(address[0])
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._stopping = threading.Event()
        super().__init__(address, _Handler)

    def serve(self) -> None:
        # The base class's own loop looks twice a second whether it should end; this one is woken.
        while not self._stopping.is_set():
            self.handle_request()

    def wake(self) -> None:
        self._stopping.set()
        self.socket.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> Any:  # noqa: ANN401 - the base class's types
        try:
            return super().get_request()
        except OSError:
            self._stopping.wait(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()  # no thread could be had
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        if self.authenticator is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(REQUEST_S)
        # Without a certificate, too: health is for everybody, and an operator may have a token.
        context = self.authenticator.credentials.server_context(tokens=True)
        try:
            secured = context.wrap_socket(request, server_side=True)
        except OSError as error:  # no TLS, or a certificate that is not believed
            log.info("http_handshake_failed", error=str(error))
            return
        with secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002
        log.warning("http_request_failed", error=repr(sys.exception()))


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Timed(self.connection, REQUEST_S))

    def handle(self) -> None:
        with suppress(OSError):  # it went away, or took too long: no news
            super().handle()

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        refusal = None if self.path in OPEN_PAGES else self._refusal()
        if refusal is not None:
            self._answer(refusal)
        elif self.server.for_this_host and not _names_this_host(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer(page())

    def _refusal(self) -> Page | None:
        """What a caller who may not see the pages is told; None for one who may."""
        authenticator = self.server.authenticator
        if authenticator is None or not isinstance(self.connection, ssl.SSLSocket):
            return None
        token = bearer_token(self.headers.get_all("Authorization", []))
        try:
            require_pages(authenticator.caller(peer_identities(self.connection), token))
        except AuthenticationError as error:
            return Page(HTTPStatus.UNAUTHORIZED, f"401 Unauthorized: {error}\n".encode())
        except ForbiddenError as error:
            return Page(HTTPStatus.FORBIDDEN, f"403 Forbidden: {error}\n".encode())
        return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Say what is wrong in words of our own: nothing that the client sent comes back to it."""
        del message, explain
        unsupported = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if unsupported else HTTPStatus(code)
        fix = f"GET one of {', '.join(self.server.pages)}"
        self._answer(Page(status, f"{status.value} {status.phrase}: {fix}\n".encode()))

    def version_string(self) -> str:
        return "kvpool"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Probes come every few seconds: they are no events."""

    def _answer(self, page: Page) -> None:
        self.close_connection = True
        self.request_version = "HTTP/1.0"  # also to what could not be parsed as a request
        self.connection.settimeout(REQUEST_S)  # of the whole answer: `sendall` counts from its start
        self.send_response(page.status)
        if page.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(page.body)


class _Timed(io.RawIOBase):
    """What a socket receives until a time is over, however slowly it comes."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._until_s = time.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._sock.settimeout(left_s)
        return self._sock.recv_into(buffer)


def _names_this_host(host: str) -> bool:
    """Whether a request to a listener on loopback means it: a browser also sends what a name of others led here."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return not host or is_loopback(name.strip("[]"))


def _verdict(why_not: str) -> Page:
    if why_not:
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"no: {why_not}\n".encode())
    return Page(HTTPStatus.OK, b"ok\n")
