"""The node's way to the metadata service for commits: the framed protocol, as fast as a client's."""

import threading
from typing import TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.identities import META
from kvpool.node.headers import SlotHeaders
from kvpool.node.records import NodeSession
from kvpool.ops.channels import Channels
from kvpool.ops.credentials import Credentials
from kvpool.ops.grpc_server import raised_by
from kvpool.ops.logging import get_logger
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool, first_reachable
from kvpool.transport.wire.messages import (
    AbortRequest,
    CommitRequest,
    Done,
    GoneRequest,
    Message,
    Statuses,
    pack,
    unpack,
)
from kvpool.v1 import directory_pb2, directory_pb2_grpc

CALL_TIMEOUT_S = 5.0

Reply = TypeVar("Reply", bound=Message)

log = get_logger(__name__)


class MetaLink:
    """Commits and aborts to the metadata service of the current session. Thread-safe.

    Args:
        address: ``host:port`` of its gRPC.
        node_id: Who is calling.
        credentials: What proves it, over TLS; None: plaintext.
    """

    def __init__(self, address: str, node_id: str, credentials: Credentials | None = None) -> None:
        self._peer = None if credentials is None else credentials.toward(META)
        self._channels = Channels(address, self._peer)
        self._principal = f"node:{node_id}"
        self._lock = threading.Lock()
        self._session: NodeSession | None = None
        self._pool: ConnectionPool | None = None

    def open_channel(self) -> grpc.Channel:
        """One that lasts, for the caller to close."""
        return self._channels.open()

    def failure(self, error: grpc.RpcError) -> KvpoolError:
        """What a failed call on such a channel stands for."""
        return self._channels.failure(error, CALL_TIMEOUT_S)

    def follow(self, session: NodeSession) -> None:
        """Use the framed protocol of the service that gave ``session``; raises UnavailableError."""
        try:
            answer = self._directory().GetPool(directory_pb2.GetPoolRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise raised_by(error) from error
        # The service that answered: of several that serve a pool it need not be the one that gave the session.
        pool = first_reachable(answer.framed, self._principal, answer.incarnation, Deadline(CALL_TIMEOUT_S), self._peer)
        with self._lock:
            old, self._pool, self._session = self._pool, pool, session
        if old is not None:
            old.close()

    def commit(self, segment_id: bytes, reservation: int, headers: SlotHeaders) -> NDArray[np.uint8]:
        """See `DirectoryLink.commit`."""
        pool, session = self._current()
        records = headers.records
        request = CommitRequest(
            session=session.session,
            segment_id=segment_id,
            reservation=reservation,
            hashes=records["hash"].tobytes(),
            shards=pack(records["shard"], "<u2"),
            slots=pack(headers.pages, "<u4"),
            generations=pack(records["generation"], "<u8"),
            checksums=pack(records["checksum"], "<u8"),
        )
        statuses = _call(pool, request, Statuses).statuses
        return unpack("statuses", statuses, "u1", len(headers))

    def abort(self, reservation: int, hashes: list[bytes]) -> None:
        """See `DirectoryLink.abort`."""
        try:
            pool, _ = self._current()
            _call(pool, AbortRequest(reservation, b"".join(hashes), crowded=False), Done)
        except KvpoolError as error:
            log.info("abort_not_delivered", reservation=reservation, error=str(error))

    def gone(self, segment_id: bytes, headers: SlotHeaders) -> None:
        """See `DirectoryLink.gone`."""
        try:
            pool, session = self._current()
            request = GoneRequest(
                session=session.session,
                segment_id=segment_id,
                namespace=headers.records["namespace"][0].tobytes(),
                hashes=headers.records["hash"].tobytes(),
                slots=pack(headers.pages, "<u4"),
                generations=pack(headers.records["generation"], "<u8"),
                bad=True,
            )
            _call(pool, request, Done)
        except KvpoolError as error:
            # Readers refuse them, and the next inventory does not name them.
            log.info("gone_not_delivered", slots=len(headers), error=str(error))

    def describe(self, namespace_id: bytes) -> bytes:
        """The namespace's document; raises KvpoolError."""
        request = directory_pb2.DescribeNamespaceRequest(namespace=namespace_id)
        try:
            return self._directory().DescribeNamespace(request, timeout=CALL_TIMEOUT_S).document
        except grpc.RpcError as error:
            raise raised_by(error) from error

    def close(self) -> None:
        """Close everything."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._channels.close()

    def _directory(self) -> directory_pb2_grpc.DirectoryStub:
        return directory_pb2_grpc.DirectoryStub(self._channels.current())

    def _current(self) -> tuple[ConnectionPool, NodeSession]:
        with self._lock:
            if self._pool is None or self._session is None:
                raise UnavailableError("the node has not joined the metadata service")
            return self._pool, self._session


def _call(pool: ConnectionPool, request: Message, reply_type: type[Reply]) -> Reply:
    deadline = Deadline(CALL_TIMEOUT_S)
    with pool.connection(deadline.left_s()) as connection:
        return connection.call(request, reply_type, deadline.left_s())
