"""Connections kept open between calls, one lent to each caller at a time."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpool.core.errors import AuthenticationError, ClosedError, KvpoolError, UnavailableError
from kvpool.ops.credentials import TlsPeer
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.connection import Connection

IDLE_MAX = 16


class ConnectionPool:
    """Connections to one address. Thread-safe.

    Args:
        uri: ``tcp://``, ``tls://`` or ``unix://``.
        principal: Who is calling.
        incarnation: The process that must answer there, or None for any: an address may have passed to another.
        peer: See `Connection`.
    """

    def __init__(self, uri: str, principal: str, incarnation: int | None = None, peer: TlsPeer | None = None) -> None:
        self.uri = uri
        self.incarnation = incarnation
        self._principal = principal
        self._peer = peer
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def connection(self, timeout_s: float) -> Iterator[Connection]:
        """A connection for the caller alone; it goes back unless it broke.

        Raises:
            UnavailableError: None can be had in ``timeout_s``.
            ClosedError: The pool is closed.
        """
        connection = self._take() or self._open(timeout_s)
        try:
            yield connection
        finally:
            self._put(connection)

    def close(self) -> None:
        """Close the idle connections, and the lent ones as they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> Connection | None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"the connections to {self.uri} are closed")
            return self._idle.pop() if self._idle else None

    def _open(self, timeout_s: float) -> Connection:
        connection = Connection(self.uri, self._principal, timeout_s, self._peer)
        if self.incarnation is not None and connection.welcome.incarnation != self.incarnation:
            connection.close()
            raise UnavailableError(f"another process answers at {self.uri} now")
        return connection

    def _put(self, connection: Connection) -> None:
        if connection.closed:
            return
        with self._lock:
            if not self._closed and not connection.waits and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()


def first_reachable(
    uris: Sequence[str], principal: str, incarnation: int, deadline: Deadline, peer: TlsPeer | None = None
) -> ConnectionPool:
    """Connections to the first of ``uris`` at which the process ``incarnation`` answers; raises KvpoolError if none."""
    failure: KvpoolError = UnavailableError("the service names no address of its framed protocol")
    for uri in uris:
        if peer is not None and uri.startswith("tcp://"):
            failure = AuthenticationError(f"{uri} is plaintext, and this process has certificates: it does without")
            continue
        pool = ConnectionPool(uri, principal, incarnation, peer)
        try:
            with pool.connection(deadline.left_s()):
                return pool
        except KvpoolError as error:
            failure = error
    raise failure
