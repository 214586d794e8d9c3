"""Assembles and runs a store node: segment, slots, data plane, gRPC, control stream."""

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc

from kvpool.core.errors import UnavailableError
from kvpool.core.identities import node_identity
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import Slots, SlotState
from kvpool.node.control import Control
from kvpool.node.copier import Copier, copy_schemes
from kvpool.node.disk import DiskFiles, DiskStore
from kvpool.node.fetching import FetchingStore
from kvpool.node.files import SegmentFiles
from kvpool.node.guarding import Guard
from kvpool.node.headers import HeaderFile
from kvpool.node.link import MetaLink
from kvpool.node.meter import NodeMeter
from kvpool.node.metrics import NodeMetrics
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.pulling import serve_segment
from kvpool.node.scrub import Scrubber, whole_progress
from kvpool.node.segment import Segment
from kvpool.node.servicer import StoreNodeServicer
from kvpool.node.serving import DataSession
from kvpool.node.store import NodeStore
from kvpool.ops.addresses import at_host
from kvpool.ops.audit import Audit, open_audit
from kvpool.ops.authentication import open_authenticator, pages_guard, security_of
from kvpool.ops.grpc_server import GrpcServer
from kvpool.ops.http import HttpServer, role_pages
from kvpool.ops.logging import get_logger
from kvpool.ops.metrics.declared import NODE
from kvpool.ops.metrics.exposition import new_registry
from kvpool.ops.settings import NodeSettings, TlsSettings
from kvpool.ops.tracing import open_tracer
from kvpool.transport import inproc
from kvpool.transport.ucx.process import UcxProcess
from kvpool.transport.ucx.shared import devices_for
from kvpool.transport.wire.server import FramedServer, Identity
from kvpool.v1 import common_pb2, store_node_pb2_grpc

SERVICES = ("kvpool.v1.StoreNode",)
STOP_GRACE_S = 1.0
JOIN_STEP_S = 0.2

log = get_logger(__name__)


class NodeServer:
    """A store node in this process.

    Args:
        settings: Its settings.
        on_leave: Called, on a thread of the node's, when the pool has drained the node and lets it go; it must not
            wait for `stop`.
        tls: Its certificate; without one it serves and speaks plaintext.

    Attributes:
        security: How it is guarded.
        data_address: ``host:port`` of the data plane, once started.
        grpc_address: ``host:port`` of gRPC, once started.
        http_address: ``host:port`` of health and metrics, once started; ``http_uri`` with the scheme.
        unix_path: The Unix socket.
        capacity_bytes: Size of the segment.
        store: The blocks, once started; for tests and embedding.
    """

    def __init__(
        self, settings: NodeSettings, on_leave: Callable[[], None] = lambda: None, tls: TlsSettings | None = None
    ) -> None:
        self.settings = settings
        identity, name = node_identity(settings.node_id), f"node-{settings.node_id}"
        self._authenticator = open_authenticator(tls or TlsSettings(), settings, name, identity)
        self._credentials = None if self._authenticator is None else self._authenticator.credentials
        self.security = security_of(self._authenticator, settings)
        self._on_leave = on_leave
        self.data_address = ""
        self.grpc_address = ""
        self.http_address = ""
        self.http_uri = ""
        self.unix_path: Path = settings.unix_socket
        self.capacity_bytes = settings.capacity_bytes
        self.store: NodeStore
        self._incarnation = int.from_bytes(os.urandom(8), "little") >> 1
        self._endpoints: list[str] = []
        self._running = ExitStack()
        self._started = False
        self._scrubbers: list[Scrubber] = []
        self._meter = NodeMeter()
        self._audit: Audit
        self._guard: Guard
        self._tracer = open_tracer("node", os.environ)
        self._framed: FramedServer
        self._grpc: GrpcServer
        self._control: Control

    def start(self) -> None:
        """Take the segment, listen, join; returns when the pool places blocks here.

        Raises:
            CapacityError: Memory or an address cannot be had.
            UnavailableError: The metadata service did not take the node in within ``join_timeout_s``.
        """
        with ExitStack() as undo:
            undo.callback(self._tracer.close)
            self._open_store(undo)
            self._listen(undo)
            self._join(undo)
            for scrubber in self._scrubbers:
                scrubber.start()
            self._started = True
            self._running = undo.pop_all()
        where = {"endpoints": self._endpoints, "http": self.http_address}
        log.info("node_started", node=self.settings.node_id, security=self.security, **where)

    def drain(self) -> None:
        """Take no new blocks, and wait for transfers under way, up to ``drain_timeout_s``."""
        self._control.drain()
        self._framed.wait_idle(self.settings.drain_timeout_s)

    def stop(self) -> None:
        """Leave the pool, stop serving and wait for every thread."""
        self._running.close()
        log.info("node_stopped", node=self.settings.node_id)

    def _open_store(self, undo: ExitStack) -> None:
        settings = self.settings
        files = SegmentFiles(settings.segment_dir, settings.node_id)
        # A node that never started leaves nothing that was not there before; a GPU's memory is never found again.

        def lasts() -> bool:
            return self._started and not settings.vram

        undo.callback(lambda: files.close(keep=settings.keep_segment and (lasts() or not files.fresh)))
        segment: Segment
        make_store: Callable[..., NodeStore]
        if settings.vram:
            vram, headers = files.open_device(settings.vram, settings.device)
            segment, make_store = vram, partial(FetchingStore, vram)
        else:
            shm, headers = files.open(settings.size, settings.hugepages)
            segment, make_store = shm, partial(NodeStore, shm)
        undo.callback(segment.close)
        undo.callback(headers.close)
        link = MetaLink(settings.meta.replace("grpc://", ""), settings.node_id, self._credentials)
        undo.callback(link.close)
        self._link = link
        slots = restore_slots(headers, segment.size_bytes // PAGE_BYTES, settings.quarantine_s)
        book = NamespaceBook(files.namespaces, link.describe)
        self.store = make_store(headers, slots, book, link, self._incarnation)
        if settings.disk is not None:
            self._open_disk(undo, settings.disk, settings.disk_size)

    def _open_disk(self, undo: ExitStack, directory: Path, size_bytes: int) -> None:
        files = DiskFiles(directory)
        # What is on disk is there to be found again, whatever becomes of the memory.
        undo.callback(lambda: files.close(keep=self._started or not files.fresh))
        segment, headers = files.open(size_bytes, self._disk_failed)
        undo.callback(segment.close)
        undo.callback(headers.close)
        slots = restore_slots(headers, segment.size_bytes // PAGE_BYTES, self.settings.quarantine_s)
        book = NamespaceBook(files.namespaces, self._link.describe)
        self.store.disk = DiskStore(segment, headers, slots, book, self._link, self._incarnation)
        if headers.error is not None:  # before there was a store to tell
            self._disk_failed(headers.error)

    def _disk_failed(self, error: OSError) -> None:
        if self.store.disk is not None:
            self.store.disk.turn_off(error, "write")

    def _listen(self, undo: ExitStack) -> None:
        settings = self.settings
        audit = self._audit = open_audit(settings.audit, authenticated=self._authenticator is not None)
        undo.callback(audit.close)
        guard = self._guard = Guard(self.store, needs_grants=self._authenticator is not None, mapping=settings.mapping)
        ucx = self._serve_ucx(undo) if settings.ucx else None
        self._framed = FramedServer(
            Identity(settings.node_id, self._incarnation),
            lambda number, local: DataSession(self.store, number, local, ucx, self._meter, guard),
            settings.connections_max,
            self._authenticator,
            audit,
            self._tracer,
        )
        undo.callback(self._framed.stop)
        tcp_uri = self._framed.listen_tcp(settings.listen, settings.data_port)
        unix_uri = self._framed.listen_unix(settings.unix_socket)
        self._framed.start()
        scheme, _, self.data_address = tcp_uri.partition("://")
        tcp_uri = at_host(tcp_uri, settings.advertise_host)
        if settings.vram:
            nearest = unix_uri.replace("unix://", "cuda://")
        else:
            nearest = inproc.register(f"{settings.node_id}-{self._incarnation:x}", self.store)
        self._endpoints = [nearest, unix_uri.replace("unix://", "shm://"), unix_uri, tcp_uri]
        if ucx is not None:
            self._endpoints.append(tcp_uri.replace(f"{scheme}://", "ucx://"))

    def _serve_ucx(self, undo: ExitStack) -> UcxProcess:
        process = serve_segment(self.store.segment, devices_for(self.settings.listen))
        undo.callback(process.stop)
        return process

    def _join(self, undo: ExitStack) -> None:
        settings = self.settings
        server = self._grpc = GrpcServer(
            SERVICES, self._register, authenticator=self._authenticator, audit=self._audit, tracer=self._tracer
        )
        undo.callback(lambda: server.stop(STOP_GRACE_S))  # first: one that starts and is not stopped hangs at exit
        self.grpc_address = server.start(settings.listen, settings.grpc_port)
        self._endpoints.append(at_host(f"grpc://{self.grpc_address}", settings.advertise_host))
        pace = (settings.scrub_bytes_per_s, settings.scrub_interval_s, self._framed.wait_idle)
        self._scrubbers = [Scrubber(store.checks, *pace) for store in self.store.tiers]
        schemes = copy_schemes(ucx=settings.ucx)
        self._copier = copier = Copier(self.store, self._link, settings.node_id, schemes, self._credentials)
        undo.callback(copier.stop)
        self._control = Control(
            settings.node_id,
            self._incarnation,
            self._endpoints,
            self.store,
            self._link,
            self._scrub,
            copier,
            self._on_leave,
            self._meter.moved_by_way,
        )
        for store in self.store.tiers:
            if isinstance(store, FetchingStore):
                store.on_off = self._control.report
        undo.callback(self._control.stop)
        for scrubber in self._scrubbers:
            undo.callback(scrubber.stop)
        self._serve_http(undo)
        self._control.start()
        if not self._joined():
            raise UnavailableError(
                f"{settings.meta} did not take the node in within {settings.join_timeout_s:g} s: "
                f"{self._control.failure}; check --meta and that `kvpool meta` runs there"
            )

    def _serve_http(self, undo: ExitStack) -> None:
        control, framed = self._control, self._framed
        metrics = NodeMetrics(
            self.store,
            self._meter,
            self._scrubbers,
            self._refusals,
            lambda: framed.connections,
            control.ready.is_set,
            self._unready,
        )
        pages = role_pages(new_registry(NODE, metrics.fill), control.is_alive, self._unready)
        http = HttpServer(pages, pages_guard(self._authenticator, self.settings))
        self.http_address = http.start(self.settings.http_listen, self.settings.http_port_used)
        self.http_uri = f"{http.scheme}://{self.http_address}"
        undo.callback(http.stop)

    def _unready(self) -> str:
        """Why the pool places nothing here now."""
        if not self._control.ready.is_set():
            return "the metadata service has not taken the node in"
        return "the node drains" if self.store.draining else ""

    def _joined(self) -> bool:
        """Wait in steps: the handler of a signal that comes just before a wait runs only after it."""
        deadline = time.monotonic() + self.settings.join_timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._control.ready.wait(min(left_s, JOIN_STEP_S)):
                return True
        return self._control.ready.is_set()

    def _register(self, server: grpc.Server) -> None:
        servicer = StoreNodeServicer(
            self.store,
            self._describe,
            lambda: self._framed.connections,
            self._refusals,
            self._drain_control,
            self._audit,
        )
        store_node_pb2_grpc.add_StoreNodeServicer_to_server(servicer, server)

    def _refusals(self) -> dict[str, int]:
        return {
            "refused_connections": self._framed.refused_connections,
            "refused_calls": self._grpc.calls.refused,
            "refused_reads": self._guard.refused,
            "refused_callers": self._framed.refused_callers + self._grpc.refused_callers,
        }

    def _drain_control(self) -> None:
        self._control.drain()

    def _describe(self) -> common_pb2.Node:
        return common_pb2.Node(
            node_id=self.settings.node_id,
            incarnation=self._incarnation,
            state="draining" if self.store.draining else "ready",
            endpoints=self._endpoints,
            segments=self._control.segments(),
            scrub=self._scrub(),
            fetched_bytes=self._copier.fetched_bytes(),
            moved_bytes=self._meter.moved_by_way(),
        )

    def _scrub(self) -> common_pb2.Scrub:
        progress, stats = whole_progress(self._scrubbers), [store.stats() for store in self.store.tiers]
        counters = sum((Counter(tier.counters) for tier in stats), Counter[str]())
        return common_pb2.Scrub(
            passes=progress.passes,
            progress=progress.progress,
            checked_blocks=counters["checked_blocks"],
            checked_bytes=counters["checked_bytes"],
            bad_blocks=counters["bad_blocks"],
            retired_bytes=sum(tier.retired_bytes for tier in stats),
        )


def restore_slots(headers: HeaderFile, pages: int, quarantine_s: float = 30.0) -> Slots:
    """The slots that the header file describes; half-written ones rest in quarantine, for ``quarantine_s``."""
    slots = Slots(pages, time.monotonic, headers.next_generation, quarantine_s)
    unsound = headers.drop_unsound()
    if unsound:
        log.warning("headers_unsound", slots=unsound)
    for state in (SlotState.COMMITTED, SlotState.WRITING):
        found = headers.scan(state)
        lengths = found.records["length"].tolist()
        committed = state == SlotState.COMMITTED
        for (page, generation), length in zip(found.named(), lengths, strict=True):
            if slots.adopt(page, length, generation, committed=committed) is None or not committed:
                headers.clear(page)
    return slots
