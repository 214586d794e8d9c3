"""The pool under simulation: the real service, nodes and clients, assembled over the simulated network."""

import itertools
import socket
from types import SimpleNamespace

import kvpool.client.meta
import kvpool.node.link
import kvpool.ops.channels
import kvpool.transport.shm
import kvpool.transport.wire.connection
import kvpool.transport.wire.server
from kvpool.client.client import Client
from kvpool.core.errors import UnavailableError
from kvpool.meta.framed import MetaSession
from kvpool.meta.membership import MembershipServicer
from kvpool.meta.server import MetaServer
from kvpool.meta.service import MetaService
from kvpool.meta.servicers import DirectoryServicer
from kvpool.node.control import Control
from kvpool.node.copier import Copier, copy_schemes
from kvpool.node.link import MetaLink
from kvpool.node.server import restore_slots
from kvpool.node.serving import DataSession
from kvpool.node.store import NodeStore
from kvpool.ops.audit import Audit
from kvpool.transport.wire.server import FramedServer, Identity
from kvpool.v1 import common_pb2

from . import rpc, shims
from .memory import Mapping, Memory, MemoryBook, MemoryHeaders
from .network import Framed
from .scheduler import Process, current

CONNECTIONS_MAX = 1024
QUARANTINE_S = 3.0


class Meta:
    """The metadata service: one process at a time answers for ``meta``."""

    host = "meta-host"

    def __init__(self, cluster, settings):
        self.cluster = cluster
        self.settings = settings
        self.numbers = itertools.count()
        self.process = None
        self.service = None

    def start(self):
        """Start an empty service; the one before is dead, or believes that it still is the service."""
        scheduler = self.cluster.scheduler
        process = self.process = Process(f"meta.{next(self.numbers)}", self.host)
        service = self.service = MetaService(self.settings, shims.Time.monotonic, scheduler.rng.randbytes)
        self.cluster.watch.service(service)
        server = FramedServer(
            Identity("meta", service.incarnation), lambda _number, _local: MetaSession(service), CONNECTIONS_MAX
        )
        servicers = {
            "kvpool.v1.Directory": DirectoryServicer(service, ["tcp://meta:7301"], "simulated"),
            "kvpool.v1.Membership": MembershipServicer(service),
        }
        ticker = SimpleNamespace(settings=self.settings, service=service, _audit=Audit(), _stopping=shims.Event())
        scheduler.spawn(process, MetaServer._tick, ticker)
        self.cluster.network.listen("meta", process, _serve_with(server, servicers))


class Node:
    """A store node: its memory stays, its processes come and go."""

    def __init__(self, cluster, number, pages):
        self.cluster = cluster
        self.name = f"node-{number}"
        self.host = f"host-{number}"
        self.memory = Memory(self.name.encode().ljust(16, b"."), pages)
        self.starts = 0
        self.process = None
        self.store = None
        self.slots = None
        self.control = None

    def start(self):
        """Start a process over what the one before left."""
        scheduler = self.cluster.scheduler
        self.process = Process(f"{self.name}.{self.starts}", self.host)
        self.starts += 1
        scheduler.spawn(self.process, self._start)

    def _start(self):
        """As `NodeServer.start` does."""
        incarnation = int.from_bytes(current().rng.randbytes(8), "little") >> 1
        headers = MemoryHeaders(self.memory)
        link = MetaLink("meta:7300", self.name)
        book = MemoryBook(self.memory, link.describe)
        slots = self.slots = restore_slots(headers, self.memory.pages, QUARANTINE_S)
        store = self.store = NodeStore(self.memory, headers, slots, book, link, incarnation)
        server = FramedServer(
            Identity(self.name, incarnation), lambda number, local: DataSession(store, number, local), CONNECTIONS_MAX
        )
        self.cluster.network.listen(self.name, self.process, _serve_with(server, {}))
        endpoints = [f"shm:///{self.host}/{self.name}", f"tcp://{self.name}:7302"]
        copier = Copier(store, link, self.name, copy_schemes(ucx=False))
        # Nothing is scrubbed, and no node is let go.
        others = (common_pb2.Scrub, copier, lambda: None)
        self.control = Control(self.name, incarnation, endpoints, store, link, *others)
        self.control.start()


class ClientHost:
    """A client: the real one, new in each of its processes."""

    def __init__(self, cluster, number, host, timeout_s):
        self.cluster = cluster
        self.number = number
        self.host = host
        self.timeout_s = timeout_s
        self.numbers = itertools.count()
        self.process = None

    def start(self, work):
        """``work(client)`` in a new process."""
        self.process = Process(f"client-{self.number}.{next(self.numbers)}", self.host)
        self.cluster.scheduler.spawn(self.process, self._run, work)

    def _run(self, work):
        work(Client("grpc://meta:7300", ("shm", "tcp"), self.timeout_s, 1, self.process.name))


class Cluster:
    """Service, nodes and clients over one network. ``watch`` sees what happens inside (`witness.Witness`)."""

    def __init__(self, scheduler, network, watch, settings):
        self.scheduler = scheduler
        self.network = scheduler.network = network
        self.watch = scheduler.watch = watch
        self.meta = Meta(self, settings)
        self.nodes = []
        self.clients = []

    def node_of_segment(self, segment_id):
        return next(node for node in self.nodes if node.memory.segment_id == segment_id)


def _serve_with(server, servicers):
    numbers = itertools.count(1)

    def serve(sock, kind):
        if kind == "grpc":
            rpc.serve(sock, servicers)
            return
        number, framed = next(numbers), Framed(sock)
        server._connections[number] = framed
        server._serve(number, framed)

    return serve


def _dial(uri, timeout_s):
    scheme, _, rest = uri.partition("://")
    if scheme == "tcp":
        return current().network.dial(rest.partition(":")[0], timeout_s)
    _, host, name = rest.split("/")
    if host != current().task.process.host:
        raise UnavailableError(f"{uri} is on another host")
    return current().network.dial(name, timeout_s, socket.AF_UNIX)


class _Descriptors:
    """`socket` for the framed server: descriptors are passed hand to hand."""

    AF_UNIX = socket.AF_UNIX

    @staticmethod
    def send_fds(sock, _buffers, descriptors):
        sock.peer.descriptors += descriptors


def _take_descriptors(connection, count):
    taken, connection._framed.sock.descriptors = connection._framed.sock.descriptors[:count], []
    return taken


def wired():
    """Connections, channels and mappings of real modules made by the simulation."""
    connection = kvpool.transport.wire.connection
    return shims.replaced(
        [
            (connection, "_dial", _dial),
            (connection, "FramedSocket", Framed),
            (connection.Connection, "take_descriptors", _take_descriptors),
            (kvpool.transport.wire.server, "socket", _Descriptors),
            (kvpool.transport.shm, "_Mapping", Mapping),
            (kvpool.ops.channels, "grpc", rpc.Grpc),
        ]
    )
