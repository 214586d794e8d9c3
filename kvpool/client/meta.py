"""The client's way to the metadata service: gRPC to find it, the framed protocol for the hot calls."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TypeVar

import grpc
import msgspec

from kvpool.client.breaker import Breaker
from kvpool.client.retries import RetryBudget
from kvpool.core.errors import (
    AuthenticationError,
    ClosedError,
    DeadlineError,
    KvpoolError,
    OverloadedError,
    SettingsError,
    UnavailableError,
    UsageError,
)
from kvpool.core.identities import META
from kvpool.core.namespace import DEFAULT_TENANT, Namespace
from kvpool.core.tenants import LIMITS
from kvpool.ops.addresses import split_address
from kvpool.ops.channels import Channels
from kvpool.ops.credentials import Credentials
from kvpool.ops.grpc_server import TRACE_KEY
from kvpool.ops.tracing import OpenSpan, carried
from kvpool.transport.backoff import full_jitter
from kvpool.transport.deadline import Deadline
from kvpool.transport.once import OpenOnce
from kvpool.transport.pool import ConnectionPool, first_reachable
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import Message, NodeInfo, SegmentInfo, Topology
from kvpool.v1 import admin_pb2, admin_pb2_grpc, common_pb2, directory_pb2, directory_pb2_grpc

Reply = TypeVar("Reply", bound=Message)
Answer = TypeVar("Answer")

PATIENCE_S = 0.2
"""Calls with shorter deadlines do not count against the service when they run out."""

PAUSE_S = 0.5
"""A service that did not answer is tried again so often: a refused dial costs little, a pool unfound much."""

RETRY_PAUSE_S = 0.05
"""Longest pause before a call is repeated: clients of a service that restarts do not all come back at once."""

_FRAMED = "framed"


class MetaClient:
    """Calls to a pool's metadata service; finds it, or another one, again after it died. Thread-safe.

    Args:
        uri: ``grpc://host:port``; of several services that serve the pool, all, with commas between.
        principal: Who is calling.
        credentials: What proves it, over TLS; None: plaintext.

    Raises:
        SettingsError: Not such a URI.
    """

    def __init__(self, uri: str, principal: str, credentials: Credentials | None = None) -> None:
        addresses = [part.removeprefix("grpc://") for part in uri.split(",")] if isinstance(uri, str) else []
        if not addresses or not all(part.startswith("grpc://") for part in uri.split(",")):
            raise SettingsError(f"pool {uri!r} is not an address; write grpc://HOST:PORT, e.g. grpc://127.0.0.1:7300")
        self.uri = uri
        self.reconnects = -1
        self.overloaded = 0
        self.budget = RetryBudget()
        self._lock = threading.Lock()
        for address in addresses:
            split_address(address)
        self._principal = principal
        self._peer = None if credentials is None else credentials.toward(META)
        self._channels = Channels(",".join(addresses), self._peer)
        self._breaker = Breaker(time.monotonic, pause_s=PAUSE_S)
        self._pools: OpenOnce[str, ConnectionPool] = OpenOnce("the client", ConnectionPool.close)
        self.topology = Topology(0, [])
        self.tenant = ""
        """Whose blocks this caller may know of, as the service says; empty: it tells nobody from anybody."""

    @property
    def _directory(self) -> directory_pb2_grpc.DirectoryStub:
        return directory_pb2_grpc.DirectoryStub(self._channels.current())

    @property
    def _admin(self) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self._channels.current())

    def open_namespace(self, document: bytes, deadline: Deadline) -> bytes:
        """Make a namespace known to the service; raises InvalidNamespaceError, UnavailableError."""
        request = directory_pb2.OpenNamespaceRequest(document=document)
        return self._ask(lambda: self._directory.OpenNamespace, request, deadline).namespace

    def owned(self, namespace: Namespace) -> Namespace:
        """The namespace, with the caller's own tenant where it names none."""
        if not self.tenant or namespace.tenant != DEFAULT_TENANT:
            return namespace
        return msgspec.structs.replace(namespace, tenant=self.tenant)

    def status(self, deadline: Deadline) -> admin_pb2.GetStatusResponse:
        """What the service says of the pool; raises UnavailableError."""
        return self._ask(lambda: self._admin.GetStatus, admin_pb2.GetStatusRequest(), deadline)

    def explain(self, request: admin_pb2.ExplainRequest, deadline: Deadline) -> admin_pb2.ExplainResponse:
        """Why blocks can or cannot be matched; raises KvpoolError."""
        return self._ask(lambda: self._admin.Explain, request, deadline)

    def block(self, request: admin_pb2.GetBlockRequest, deadline: Deadline) -> admin_pb2.GetBlockResponse:
        """What the directory knows of a block; raises KvpoolError."""
        return self._ask(lambda: self._admin.GetBlock, request, deadline)

    def drain(self, node_id: str, drain_timeout_s: float, deadline: Deadline, *, stay: bool) -> admin_pb2.DrainStatus:
        """Begin to drain a node, or go on with it; raises UsageError for a node that is not there."""
        request = admin_pb2.DrainNodeRequest(node_id=node_id, timeout_ms=int(drain_timeout_s * 1000), stay=stay)
        return self._ask(lambda: self._admin.Drain, request, deadline)

    def drain_status(self, node_id: str, deadline: Deadline) -> admin_pb2.DrainStatus:
        """How far it has come; raises UsageError when the node was not drained."""
        return self._ask(lambda: self._admin.GetDrain, admin_pb2.GetDrainRequest(node_id=node_id), deadline)

    def cancel_drain(self, node_id: str, deadline: Deadline) -> admin_pb2.DrainStatus:
        """Place blocks on the node again; raises UsageError when it does not drain."""
        return self._ask(lambda: self._admin.CancelDrain, admin_pb2.CancelDrainRequest(node_id=node_id), deadline)

    def set_quota(
        self, tenant: str, limits: Mapping[str, float], unlimited: Collection[str], deadline: Deadline
    ) -> admin_pb2.TenantStatus:
        """Change limits of a tenant; raises UsageError for one that cannot be."""
        try:
            request = admin_pb2.SetQuotaRequest(tenant=tenant, unlimited=unlimited, **limits)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise UsageError(f"limits {dict(limits)} cannot be: {error}; they are {', '.join(LIMITS)}") from error
        return self._ask(lambda: self._admin.SetQuota, request, deadline)

    def call(self, request: Message, reply_type: type[Reply], deadline: Deadline, *, again: bool) -> Reply:
        """A hot call; ``again`` allows one more try on a new connection, if the retry budget does too.

        Raises:
            UnavailableError: The service cannot be reached, or was found dead lately.
            OverloadedError: It has too much to do; that is not tried again.
            KvpoolError: What the service answered.
        """
        if not self._breaker.allows():
            raise UnavailableError(f"{self.uri} did not answer lately; it is tried again within a second")
        self.budget.called()
        try:
            return self._call_once(request, reply_type, deadline)
        except (OverloadedError, DeadlineError):
            raise  # asking again cannot help: not at once, or not in time
        except UnavailableError:
            if not again or not self.budget.allows():
                raise
        time.sleep(min(full_jitter(RETRY_PAUSE_S), deadline.left_s()))
        return self._call_once(request, reply_type, deadline)

    def calls(
        self,
        requests: Iterable[tuple[Message, OpenSpan]],
        reply_type: type[Reply],
        deadline: Deadline,
        meanwhile: Callable[[], None],
    ) -> Iterator[Reply]:
        """Hot calls over one connection: the service works on the next while the caller uses an answer.

        Requests are drawn when they are sent, each with the step that it is of, which ends with the answer, or the
        calls. While the first is awaited, ``meanwhile`` is called. Raises as `call`, at the first call that fails;
        nothing is tried again.
        """
        if not self._breaker.allows():
            raise UnavailableError(f"{self.uri} did not answer lately; it is tried again within a second")
        pool: ConnectionPool | None = None
        unposted, posted = iter(requests), deque[OpenSpan]()
        try:
            pool = self.find(deadline)
            with pool.connection(deadline.left_s()) as connection:
                _post(connection, islice(unposted, 2), posted, deadline)
                meanwhile()
                while posted:
                    self.budget.called()
                    with posted[0].at_hand():
                        reply = connection.collect(reply_type, deadline.left_s())
                    posted.popleft().end()
                    yield reply
                    _post(connection, islice(unposted, 1), posted, deadline)
        except KvpoolError as error:
            self._judge(error, pool, deadline)
            raise
        finally:
            for step in posted:
                step.end()
        self._breaker.succeeded()

    def find(self, deadline: Deadline) -> ConnectionPool:
        """Connections to the framed protocol; asks gRPC where it is when there are none."""
        return self._pools.get(_FRAMED, partial(self._find, deadline), deadline)

    def refresh(self, deadline: Deadline) -> None:
        """Ask which nodes there are, for a caller whose own calls do not tell; raises UnavailableError."""
        self.topology = _topology(self._pool(deadline).topology)

    def learn(self, topology: Topology | None) -> None:
        """Keep the nodes that came with an answer."""
        if topology is not None:
            self.topology = topology

    def close(self) -> None:
        """Close all connections."""
        self._pools.close()
        self._channels.close()

    def _call_once(self, request: Message, reply_type: type[Reply], deadline: Deadline) -> Reply:
        pool: ConnectionPool | None = None
        try:
            pool = self.find(deadline)
            with pool.connection(deadline.left_s()) as connection:
                reply = connection.call(request, reply_type, deadline.left_s())
        except KvpoolError as error:
            self._judge(error, pool, deadline)
            raise
        self._breaker.succeeded()
        return reply

    def _judge(self, error: KvpoolError, pool: ConnectionPool | None, deadline: Deadline) -> None:
        """What a failed call says of the service."""
        if isinstance(error, OverloadedError):
            with self._lock:
                self.overloaded += 1
        if isinstance(error, OverloadedError) or not isinstance(error, UnavailableError):
            self._breaker.succeeded()  # it answered
        elif not isinstance(error, DeadlineError) or deadline.timeout_s >= PATIENCE_S:
            # A caller in a hurry says nothing of the service: others share the breaker.
            self._breaker.failed()
            if pool is not None:
                self._pools.drop(_FRAMED, pool)

    def _find(self, deadline: Deadline) -> ConnectionPool:
        answer = self._pool(deadline)
        pool = first_reachable(answer.framed, self._principal, answer.incarnation, deadline, self._peer)
        self.topology, self.tenant = _topology(answer.topology), answer.tenant
        self.reconnects += 1
        return pool

    def _pool(self, deadline: Deadline) -> directory_pb2.GetPoolResponse:
        return self._ask(
            lambda: self._directory.GetPool, directory_pb2.GetPoolRequest(principal=self._principal), deadline
        )

    def _ask(self, method: Callable[[], Callable[..., Answer]], request: object, deadline: Deadline) -> Answer:
        """A gRPC call, of each service once until one can be reached; raises what it stands for."""
        trace = carried()
        metadata = [(TRACE_KEY, trace)] if trace else None
        for others in reversed(range(self._channels.servers)):
            try:
                return method()(request, timeout=deadline.left_s(), metadata=metadata)
            except grpc.RpcError as error:
                raised = self._failure(error, deadline)
                if not others or not _is_nobody_there(raised):
                    raise raised from error
            except ValueError as error:  # what gRPC says of a closed channel
                raise ClosedError("the client is closed; connect again") from error
        raise AssertionError("there is at least one service")

    def _failure(self, error: grpc.RpcError, deadline: Deadline) -> KvpoolError:
        raised = self._channels.failure(error, deadline.rest_s())
        if isinstance(raised, AuthenticationError):
            return AuthenticationError(f"pool {self.uri}: {raised}")
        if isinstance(raised, UnavailableError) and not isinstance(raised, OverloadedError):
            return type(raised)(f"pool {self.uri} cannot be reached: {raised}; check that `kvpool meta` runs there")
        return raised


def _post(
    connection: Connection, requests: Iterable[tuple[Message, OpenSpan]], posted: deque[OpenSpan], deadline: Deadline
) -> None:
    for request, step in requests:
        posted.append(step)
        with step.at_hand():
            connection.post(request, deadline.left_s())


def _is_nobody_there(error: KvpoolError) -> bool:
    answered = (AuthenticationError, DeadlineError, OverloadedError)
    return isinstance(error, UnavailableError) and not isinstance(error, answered)


def _topology(message: common_pb2.Topology) -> Topology:
    nodes = [
        NodeInfo(
            node.node_id,
            node.incarnation,
            node.state,
            list(node.endpoints),
            [SegmentInfo(s.number, s.segment_id, s.medium, s.capacity_bytes) for s in node.segments if not s.off],
        )
        for node in message.nodes
    ]
    return Topology(message.version, nodes)
