"""The client: a connection to a pool, from which namespaces are opened."""

import os
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvpool.client.counters import Counters
from kvpool.client.keyspace import Keyspace
from kvpool.client.meta import MetaClient
from kvpool.client.nodes import Nodes
from kvpool.client.results import (
    ClientStats,
    DrainStatus,
    NamespaceStatus,
    NodeStatus,
    PoolStatus,
    RecoveryStatus,
    SegmentStatus,
    ServerStatus,
    SharedStateStatus,
    TenantStatus,
)
from kvpool.core.directory import DISK
from kvpool.core.errors import ClosedError, KvpoolError, UsageError
from kvpool.core.limits import DEADLINE_S_MAX, DRAIN_S_MAX, STREAMS_MAX
from kvpool.core.members import Scrub
from kvpool.core.namespace import Namespace
from kvpool.ops.credentials import Credentials, open_credentials
from kvpool.ops.failpoints import arm
from kvpool.ops.settings import TlsSettings
from kvpool.ops.tracing import open_tracer
from kvpool.transport.deadline import Deadline
from kvpool.transport.streams import Streams
from kvpool.v1 import admin_pb2, common_pb2

if TYPE_CHECKING:
    from kvpool.ops.metrics.exposition import RoleCollector
CALLER_NAMES = ("client",)
"""Certificates of ``tls.dir`` that a program takes; commands take an operator's."""

DEFAULT_TRANSPORTS = ("inproc", "shm", "tcp")


class Client:
    """A pool, as seen by one engine or tool. Thread-safe; close it, or use it in a ``with`` statement.

    Made by `connect`.
    """

    def __init__(
        self,
        uri: str,
        transports: Sequence[str],
        timeout_s: float,
        streams: int,
        principal: str,
        credentials: Credentials | None = None,
    ) -> None:
        self.timeout_s = check_timeout(timeout_s)
        self.credentials = credentials
        self._tracer = open_tracer("client", os.environ)
        self._meta = MetaClient(uri, principal, credentials)
        try:
            self._nodes = Nodes(tuple(transports), uri, principal, streams, credentials)
        except BaseException:
            self._meta.close()
            raise
        self._counters = Counters()
        self._streams = Streams(streams)
        self._closed = threading.Event()
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, namespace: Namespace, timeout_s: float | None = None) -> Keyspace:
        """Open ``namespace`` in the pool.

        Where callers are authenticated, a namespace that names no tenant is the caller's own tenant's, as the
        keyspace's ``namespace`` then says.

        Raises:
            ForbiddenError: It names another tenant than the caller's.
            UnavailableError: The pool cannot be reached.
            CapacityError: The pool has too many namespaces open.
            ClosedError: The client is closed.
        """
        keyspace = Keyspace(self, self._meta.owned(namespace))
        keyspace._open(self._deadline(timeout_s))
        return keyspace

    def status(self, timeout_s: float | None = None, *, reach: bool = False) -> PoolStatus:
        """The pool as its metadata service sees it.

        Args:
            timeout_s: Deadline; by default the client's.
            reach: Connect to each ready node first, so that its ``transport`` says what this client uses.

        Raises:
            UnavailableError: The service cannot be reached.
        """
        deadline = self._deadline(timeout_s)
        answer = self._meta.status(deadline)
        if reach:
            self._meta.find(deadline)
            for node in self._meta.topology.nodes:
                with suppress(KvpoolError):  # then it has no transport, and that is shown
                    self._nodes.reach(node, deadline)
        names, carriers = self._nodes.names(), self._nodes.carriers()
        return PoolStatus(
            incarnation=answer.incarnation,
            version=answer.version,
            namespaces={n.namespace.hex(): n.document.decode() for n in answer.namespaces},
            usage=tuple(map(_namespace_status, answer.namespaces)),
            misses=dict(answer.misses),
            uptime_s=answer.uptime_s,
            unix_time_s=answer.unix_time_s,
            nodes=tuple(
                _node_status(node, names.get(node.incarnation), carriers.get(node.incarnation, ""))
                for node in answer.topology.nodes
            ),
            counters=dict(answer.counters),
            recovery=_recovery_status(answer.recovery),
            security=answer.security,
            tenants=tuple(TenantStatus.of(tenant) for tenant in answer.tenants),
            events=tuple(answer.events),
            state=_state_status(answer.state) if answer.HasField("state") else None,
            servers=tuple(_server_status(server) for server in answer.servers),
        )

    def set_quota(
        self, tenant: str, *, unlimited: Collection[str] = (), timeout_s: float | None = None, **limits: float
    ) -> TenantStatus:
        """Change limits of a tenant, known or not, until the metadata service restarts; settings are for longer.

        Args:
            tenant: Its name.
            unlimited: Limits to lift, by name.
            timeout_s: Deadline of the call.
            limits: New ones: ``bytes``, ``share``, ``pins``, ``lookups_per_s``, ``writes_per_s``; others stay.

        Raises:
            UsageError: A limit that there is not, or a value that cannot be.
            UnavailableError: The service cannot be reached.
        """
        return TenantStatus.of(self._meta.set_quota(tenant, limits, unlimited, self._deadline(timeout_s)))

    def drain(
        self, node_id: str, *, drain_timeout_s: float = 300.0, stay: bool = False, timeout_s: float | None = None
    ) -> DrainStatus:
        """Begin to copy a node's blocks to other nodes, the most recently used first; then it leaves the pool.

        Returns at once; `drain_status` says how far it is. Asked again, it goes on with what is under way.

        Args:
            node_id: The node.
            drain_timeout_s: Time for copying; what is not copied by then stays behind.
            stay: Keep the node in the pool, serving what it has.
            timeout_s: Deadline of the call.

        Raises:
            UsageError: No live node has this name.
            UnavailableError: The service cannot be reached.
        """
        if not isinstance(drain_timeout_s, int | float) or not 0 < drain_timeout_s <= DRAIN_S_MAX:
            raise UsageError(f"drain_timeout_s is {drain_timeout_s!r}; it must be above 0 and at most {DRAIN_S_MAX:g}")
        return _drain_status(self._meta.drain(node_id, drain_timeout_s, self._deadline(timeout_s), stay=stay))

    def drain_status(self, node_id: str, timeout_s: float | None = None) -> DrainStatus:
        """How far the latest drain of a node has come; raises UsageError when there was none."""
        return _drain_status(self._meta.drain_status(node_id, self._deadline(timeout_s)))

    def cancel_drain(self, node_id: str, timeout_s: float | None = None) -> DrainStatus:
        """Place blocks on a draining node again; raises UsageError when it does not drain."""
        return _drain_status(self._meta.cancel_drain(node_id, self._deadline(timeout_s)))

    def stats(self) -> ClientStats:
        """Counts since the client was made."""
        counters = self._counters
        return ClientStats(
            loaded_bytes=dict(counters.loaded_bytes),
            stored_bytes=dict(counters.stored_bytes),
            misses=dict(counters.misses),
            verify_failures=counters.verify_failures,
            stores_refused=counters.stores_refused,
            reconnects=max(0, self._meta.reconnects),
            retries=self._meta.budget.retries,
            retries_denied=self._meta.budget.denied,
            overloaded=self._meta.overloaded,
            fallbacks=self._nodes.fallbacks(),
        )

    def collector(self) -> "RoleCollector":
        """The same counts, and the times of each step, for Prometheus: ``registry.register(client.collector())``.

        One client a registry: a program with several has a registry for each, or registers one of them.
        """
        from kvpool.client.metrics import collector_of  # noqa: PLC0415 - most clients are not scraped

        return collector_of(self)

    def _deadline(self, timeout_s: float | None) -> Deadline:
        """The deadline of a call made now; raises ClosedError after `close`, UsageError for an impossible one."""
        if self._closed.is_set():
            raise ClosedError("the client is closed; connect again")
        if os.getpid() != self._process:
            raise UsageError(
                "the client was made before fork(); its threads and sockets are the parent's: connect anew"
            )
        return Deadline(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def close(self) -> None:
        """Close all connections; calls in flight end as misses or with ClosedError."""
        self._closed.set()
        self._nodes.close()
        self._meta.close()
        self._streams.close()
        self._tracer.close()


def connect(
    uri: str = "grpc://127.0.0.1:7300",
    *,
    transports: Sequence[str] = DEFAULT_TRANSPORTS,
    timeout_s: float = 5.0,
    streams: int = 2,
    principal: str = "",
    tls: TlsSettings | None = None,
) -> Client:
    """Connect to the pool at ``uri``.

    Args:
        uri: ``grpc://host:port`` of its metadata service.
        transports: Schemes to move blocks by, best first; the first that reaches a node is used for it. ``ucx``
            starts a process first, which takes about a second, and is given up after 10.
        timeout_s: Deadline of calls that name none.
        streams: Threads, or connections, that one large transfer may use.
        principal: Who is calling, for the pool's logs; by default this process's number.
        tls: Certificates, or a CA and a token, for a pool with TLS: ``kvpool.TlsSettings(dir="/etc/kvpool/tls")``.

    Returns:
        A client, connected.

    Raises:
        AuthenticationError: The pool does not believe who is calling, or is not the one that it should be.
        UnavailableError: The pool does not answer in ``timeout_s``.
        UsageError: An address, a file, a transport, or a number that cannot be, or a transport that is not installed.
    """
    if not isinstance(streams, int) or not 1 <= streams <= STREAMS_MAX:
        raise UsageError(f"streams is {streams!r}; use from 1 to {STREAMS_MAX}")
    if isinstance(transports, str) or not transports:
        raise UsageError(f"transports is {transports!r}; give a list, e.g. ['shm', 'tcp']")
    arm(os.environ)
    if tls is not None and not isinstance(tls, TlsSettings):
        raise UsageError(
            f"tls is a {type(tls).__name__}; give kvpool.TlsSettings, e.g. kvpool.TlsSettings(dir='certs')"
        )
    credentials = None if tls is None else open_credentials(tls, CALLER_NAMES)
    client = Client(uri, transports, timeout_s, streams, principal or f"pid:{os.getpid()}", credentials)
    try:
        client._meta.find(client._deadline(None))
    except BaseException:
        client.close()
        raise
    return client


def check_timeout(timeout_s: float) -> float:
    """``timeout_s``, if it can be a deadline; raises UsageError."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= DEADLINE_S_MAX:
        raise UsageError(f"timeout_s is {timeout_s!r}; it must be above 0 and at most {DEADLINE_S_MAX:g}")
    return timeout_s


def _recovery_status(message: admin_pb2.Recovery) -> RecoveryStatus:
    return RecoveryStatus(message.active, message.nodes_reported, message.nodes_expected, message.lasted_s)


def _state_status(message: admin_pb2.SharedState) -> SharedStateStatus:
    counts = (message.primaries, message.replicas, message.lag_bytes, message.used_bytes)
    return SharedStateStatus(message.url, message.epoch, *counts)


def _server_status(message: admin_pb2.Server) -> ServerStatus:
    return ServerStatus(message.incarnation, message.address, message.version, message.ping_s, message.failures)


def _node_status(node: common_pb2.Node, transport: str | None, carrier: str) -> NodeStatus:
    segments = tuple(
        SegmentStatus(s.segment_id.hex(), s.medium, s.capacity_bytes, s.used_bytes, s.blocks, s.off)
        for s in node.segments
    )
    memory = [segment for segment in segments if segment.medium != DISK]
    return NodeStatus(
        node_id=node.node_id,
        state=node.state,
        capacity_bytes=sum(s.capacity_bytes for s in memory),
        used_bytes=sum(s.used_bytes for s in memory),
        blocks=sum(s.blocks for s in memory),
        endpoints=tuple(node.endpoints),
        transport=transport,
        carrier=carrier,
        segments=segments,
        scrub=Scrub.of(node.scrub),
        fetched_bytes=dict(node.fetched_bytes),
        moved_bytes=dict(node.moved_bytes),
        version=node.version,
    )


def _namespace_status(message: admin_pb2.NamespaceStatus) -> NamespaceStatus:
    return NamespaceStatus(
        namespace=message.namespace.hex(),
        blocks=message.blocks,
        size_bytes=message.size_bytes,
        asked_blocks=message.asked_blocks,
        matched_blocks=message.matched_blocks,
        read_bytes=message.read_bytes,
        stored_bytes=message.stored_bytes,
    )


def _drain_status(status: admin_pb2.DrainStatus) -> DrainStatus:
    left = (status.left_blocks, status.left_bytes)
    return DrainStatus(status.node_id, status.state, status.blocks, status.bytes, *left, status.reason)
