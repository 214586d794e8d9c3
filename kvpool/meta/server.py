"""Assembles and runs the metadata service: state, framed protocol, gRPC, housekeeping."""

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from kvpool.core.errors import SettingsError, StateAwayError
from kvpool.core.identities import META as META_IDENTITY
from kvpool.core.members import MemberState
from kvpool.meta.framed import REQUESTS, MetaSession
from kvpool.meta.membership import MembershipServicer
from kvpool.meta.metrics import MetaMetrics
from kvpool.meta.page import no_pages, people_pages
from kvpool.meta.page_state import PageState
from kvpool.meta.service import MetaService
from kvpool.meta.servicers import AdminServicer, DirectoryServicer
from kvpool.meta.serving import Serving
from kvpool.meta.using import Uses
from kvpool.ops.addresses import at_host
from kvpool.ops.audit import open_audit
from kvpool.ops.authentication import open_authenticator, pages_guard, security_of
from kvpool.ops.grpc_server import GrpcServer
from kvpool.ops.http import HttpServer, Pages, role_pages
from kvpool.ops.logging import get_logger
from kvpool.ops.metrics import latencies
from kvpool.ops.metrics.declared import META
from kvpool.ops.metrics.exposition import new_registry
from kvpool.ops.settings import MetaSettings, TlsSettings, is_loopback
from kvpool.ops.tracing import open_tracer
from kvpool.ops.version import __version__
from kvpool.transport.wire.server import FramedServer, Identity
from kvpool.v1 import admin_pb2_grpc, directory_pb2_grpc, membership_pb2_grpc

if TYPE_CHECKING:
    from kvpool.meta.events import EventPublisher

SERVICES = ("kvpool.v1.Directory", "kvpool.v1.Membership", "kvpool.v1.Admin")
READY_SERVICES = ("kvpool.v1.Directory",)
STOP_GRACE_S = 1.0
PAUSED_HEARTBEATS = 3
"""A wait of one heartbeat that took so many was a pause of the whole process."""

log = get_logger(__name__)


class MetaServer:
    """A metadata service in this process. `start` returns when it serves; `stop` when nothing of it is left.

    Args:
        settings: Its settings.
        tls: Its certificate; without one it serves plaintext.

    Attributes:
        service: The state, for tests and embedding.
        security: How it is guarded.
        grpc_address: ``host:port``, once started.
        token_address: ``host:port`` for callers with tokens, if there is one, once started.
        framed_address: ``host:port``, once started.
        http_address: ``host:port`` of health and metrics, once started.
        events: Publishes events, where a port says that it should.
        uri: What clients and nodes are told: ``grpc://host:port``.
    """

    def __init__(self, settings: MetaSettings, tls: TlsSettings | None = None) -> None:
        self.settings = settings
        self._authenticator = open_authenticator(tls or TlsSettings(), settings, "meta", META_IDENTITY)
        self.security = security_of(self._authenticator, settings)
        takes_tokens = self._authenticator is not None and self._authenticator.tokens is not None
        if takes_tokens != (settings.token_port is not None):
            raise SettingsError(
                "tokens are for a port of their own: name both tls.tokens and meta.token_port, or neither"
            )
        self._audit = open_audit(settings.audit, authenticated=self._authenticator is not None)
        self.service = _open_service(settings, self._recovered)
        self.service.reads.is_on = self._authenticator is not None
        self._tracer = open_tracer("meta", os.environ)
        self.grpc_address = ""
        self.token_address = ""
        self.framed_address = ""
        self.http_address = ""
        self.events = self._open_events(tls or TlsSettings())
        times, uses = latencies(REQUESTS.values()), Uses(self.service, self._audit)
        self._framed = FramedServer(
            Identity("meta", self.service.incarnation),
            lambda _number, _local: MetaSession(self.service, times, uses),
            settings.connections_max,
            self._authenticator,
            self._audit,
            self._tracer,
        )
        metrics = MetaMetrics(
            self.service, times, self._refusals, lambda: self._framed.connections, self._unready, self.events
        )
        pages = role_pages(new_registry(META, metrics.fill), self._is_alive, self._unready)
        self._http = HttpServer(pages | self._people_pages(), pages_guard(self._authenticator, settings))
        self._membership = MembershipServicer(self.service, self._audit)
        self._grpc: GrpcServer | None = None
        self._stopping = threading.Event()
        self._is_ready = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="kvpool-tick", daemon=True)

    @property
    def uri(self) -> str:
        """Where the pool is reached."""
        return f"grpc://{self.grpc_address}"

    @property
    def http_uri(self) -> str:
        """Where health and metrics are, once started."""
        return f"{self._http.scheme}://{self.http_address}"

    def start(self) -> None:
        """Listen and serve.

        Raises:
            CapacityError: An address cannot be listened on; nothing is left running.
        """
        settings = self.settings
        try:
            tcp_uri = self._framed.listen_tcp(settings.listen, settings.framed_port)
            self.framed_address = tcp_uri.partition("://")[2]
            framed = [at_host(tcp_uri, settings.advertise_host)]
            if settings.unix_socket is not None:
                framed.insert(0, self._framed.listen_unix(settings.unix_socket))
            self._framed.start()
            if self.events is not None:
                self.events.start()  # before there is anything to tell
            self._grpc = GrpcServer(
                SERVICES,
                lambda s: self._register(s, framed),
                streams_max=settings.nodes_max,
                reflection_on=settings.reflection,
                authenticator=self._authenticator,
                audit=self._audit,
                tracer=self._tracer,
            )
            if settings.token_port is not None:
                self.token_address = self._grpc.listen_for_tokens(settings.listen, settings.token_port)
            self.grpc_address = self._grpc.start(settings.listen, settings.grpc_port)
            self._show_readiness()
            self.http_address = self._http.start(settings.http_listen, settings.http_port_used)
        except BaseException:
            if self._grpc is not None:
                self._grpc.stop(STOP_GRACE_S)  # one that starts and is not stopped hangs at exit
            self._framed.stop()
            if self.events is not None:
                self.events.stop()
            raise
        self.service.started(self.grpc_address)
        self._ticker.start()
        where = {"grpc": self.grpc_address, "framed": framed, "http": self.http_address}
        log.info("meta_started", security=self.security, **where, incarnation=self.service.incarnation)

    def stop(self) -> None:
        """Stop serving and wait for every thread."""
        self._http.stop()
        self.service.stopping()
        self._stopping.set()
        self.service.work.set()
        if self._grpc is not None:
            self._grpc.stop(STOP_GRACE_S)
        self._framed.stop()
        if self._ticker.ident is not None:
            self._ticker.join()
        self.service.close()
        if self.events is not None:
            self.events.stop()
        self._audit.close()
        self._tracer.close()
        log.info("meta_stopped")

    def _open_events(self, tls: TlsSettings) -> "EventPublisher | None":
        if self.settings.events_port is None:
            return None
        assert isinstance(self.service, MetaService), "others refuse the setting"
        from kvpool.meta.events import EventPublisher  # noqa: PLC0415 - ZeroMQ, which nothing else needs

        return EventPublisher(self.service, self.settings, tls)

    def _people_pages(self) -> Pages:
        if not isinstance(self.service, MetaService):
            return no_pages("meta.state is set, and the page shows a directory in the service's own memory")
        if self._authenticator is not None and not is_loopback(self.settings.http_listen) and self.settings.insecure:
            return no_pages("meta.insecure lets anybody ask here, and the page names the blocks of all tenants")
        about = {"version": __version__, "security": self.security}
        return people_pages(PageState(self.service, about, time.monotonic))

    def _register(self, server: grpc.Server, framed: list[str]) -> None:
        directory_pb2_grpc.add_DirectoryServicer_to_server(
            DirectoryServicer(self.service, framed, __version__, self._audit), server
        )
        membership_pb2_grpc.add_MembershipServicer_to_server(self._membership, server)
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminServicer(self.service, __version__, self._counts, self.security, self.event_endpoints, self._audit),
            server,
        )

    @property
    def event_endpoints(self) -> list[str]:
        """Where events are published, as others dial it: the stream, then replays and snapshots; empty: nowhere."""
        if self.events is None:
            return []
        return [
            at_host(uri, self.settings.advertise_host) for uri in (self.events.endpoint, self.events.replay_endpoint)
        ]

    def _counts(self) -> dict[str, int]:
        return self._refusals() | (self.events.counts() if self.events is not None else {})

    def _refusals(self) -> dict[str, int]:
        return {
            "refused_requests": self.service.requests.refused,
            "refused_nodes": self._membership.nodes.refused,
            "refused_calls": self._grpc.calls.refused if self._grpc is not None else 0,
            "refused_connections": self._framed.refused_connections,
            "refused_callers": self._framed.refused_callers
            + self._membership.refused_callers
            + (self._grpc.refused_callers if self._grpc else 0),
        }

    def _is_alive(self) -> bool:
        publishes = self.events is None or self.events.is_alive
        return self._ticker.ident is None or (self._ticker.is_alive() and publishes)

    def _unready(self) -> str:
        """Why clients should not come here now: they would get nothing but misses."""
        if not self._is_ready.is_set():
            return "recovering: nodes have yet to report what they hold"
        try:
            ready = self.service.ask(lambda _, members: any(member.state == MemberState.READY for member in members))
        except StateAwayError as error:
            return str(error)
        return "" if ready else "no node is ready"

    def _recovered(self) -> None:
        self._is_ready.set()
        self._show_readiness()

    def _show_readiness(self) -> None:
        """Live is not ready: while the directory is rebuilt, health says so of its service alone."""
        if self._grpc is not None:
            self._grpc.set_serving(serving=self._is_ready.is_set(), services=READY_SERVICES)

    def _tick(self) -> None:
        heartbeat_s = self.settings.heartbeat_s
        while not self._stopping.is_set():
            began_s = time.monotonic()
            self.service.work.wait(heartbeat_s)
            if time.monotonic() - began_s > PAUSED_HEARTBEATS * heartbeat_s:
                self.service.resumed()
            try:
                self.service.tick()
                self._audit.flush(due=True)
            except MemoryError:  # the next one may find some: without ticks nothing would ever expire
                log.warning("out_of_memory", what="tick")


def _open_service(settings: MetaSettings, on_recovered: Callable[[], None]) -> Serving:
    """A service with a directory of its own, or one that shares it in Redis."""
    if settings.state is None:
        return MetaService(settings, time.monotonic, os.urandom, on_recovered)
    from kvpool.meta.shared.service import SharedMetaService  # noqa: PLC0415 - brings a client of Redis

    return SharedMetaService(settings, time.monotonic, os.urandom, on_recovered)
