"""The node's control loop: dial the metadata service, announce what is here, obey its orders, dial again."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import grpc

from kvpool.core.directory import FreeSlot
from kvpool.core.errors import KvpoolError, ProtocolError
from kvpool.core.limits import ANNOUNCE_BLOCKS_MAX, NO_NUMBER
from kvpool.node.copier import Copier
from kvpool.node.headers import SlotHeaders
from kvpool.node.link import MetaLink
from kvpool.node.records import NodeSession
from kvpool.node.store import NodeStore
from kvpool.ops.failpoints import failpoint
from kvpool.ops.logging import get_logger
from kvpool.ops.version import __version__
from kvpool.transport.backoff import Backoff
from kvpool.transport.wire.messages import PROTOCOL_VERSION, pack
from kvpool.v1 import common_pb2, membership_pb2, membership_pb2_grpc

REDIAL_FIRST_S = 0.2
REDIAL_MAX_S = 1.0
"""Limits of the pauses: a node is back within two seconds of its service, and a thousand nodes not all at once."""
INVENTORY_PART_BLOCKS = 4_096
"""Blocks of one part: how long one holds the directory, about 5 ms."""

assert INVENTORY_PART_BLOCKS <= ANNOUNCE_BLOCKS_MAX

log = get_logger(__name__)


class Control:
    """Keeps one control stream open while the node lives.

    Args:
        node_id: The node's name.
        incarnation: Random, new at each start.
        endpoints: URIs of its data plane, best first.
        store: What it holds, with the disk's beside it.
        link: The metadata service.
        scrub: What was checked of its blocks, now.
        copier: Fetches what the service orders from other nodes.
        on_leave: Called when the pool lets the node go.
        moved_bytes: What the data plane has moved, by direction and transport.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: int,
        endpoints: list[str],
        store: NodeStore,
        link: MetaLink,
        scrub: Callable[[], common_pb2.Scrub],
        copier: Copier,
        on_leave: Callable[[], None],
        moved_bytes: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._endpoints = endpoints
        self._store = store
        self._link = link
        self._scrub = scrub
        self._copier = copier
        self._on_leave = on_leave
        self._moved_bytes = moved_bytes
        self._stopping = threading.Event()
        self._call: grpc.CallIterator[membership_pb2.ToNode] | None = None
        self._out: queue.SimpleQueue[membership_pb2.FromNode | None] = queue.SimpleQueue()
        self._orders_applied = 0
        self._meta_incarnation = 0
        self._thread = threading.Thread(target=self._run, name="kvpool-control", daemon=True)
        self.ready = threading.Event()
        self.failure: str | None = None

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the loop, once started, still runs."""
        return self._thread.ident is None or self._thread.is_alive()

    def drain(self) -> None:
        """Tell the service that nothing new should be placed here."""
        self._store.draining = True
        self._out.put(membership_pb2.FromNode(draining=membership_pb2.NodeDraining()))

    def report(self) -> None:
        """Send a heartbeat now: something has changed that should not wait for the next."""
        heartbeat = membership_pb2.Heartbeat(
            orders_applied=self._orders_applied,
            scrub=self._scrub(),
            segments=self.segments(),
            fetched_bytes=self._copier.fetched_bytes(),
            moved_bytes=self._moved_bytes(),
        )
        self._out.put(membership_pb2.FromNode(heartbeat=heartbeat))

    def stop(self) -> None:
        """End the stream and wait for the loop."""
        self._stopping.set()
        self._out.put(None)
        if self._call is not None:
            self._call.cancel()  # type: ignore[no-untyped-call]
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(REDIAL_FIRST_S, REDIAL_MAX_S)
        while not self._stopping.is_set():
            try:
                with closing(self._link.open_channel()) as channel:
                    self._one_session(channel)
            except grpc.RpcError as error:
                self.failure = str(self._link.failure(error))
            except (KvpoolError, MemoryError) as error:
                self.failure = str(error) or "out of memory"
            self._obey(None)
            if self.ready.is_set() and not self._stopping.is_set():
                log.warning("control_stream_ended", node=self._node_id, reason=self.failure)
                backoff.reset()
            self.ready.clear()
            self._stopping.wait(backoff.next_s())

    def _one_session(self, channel: grpc.Channel) -> None:
        self._out = queue.SimpleQueue()
        self._out.put(self._hello())
        call = self._call = membership_pb2_grpc.MembershipStub(channel).Control(self._outgoing())
        if self._stopping.is_set():
            call.cancel()  # type: ignore[no-untyped-call]
        beat: threading.Thread | None = None
        ended = threading.Event()
        try:
            for message in call:
                instruction = message.WhichOneof("instruction")
                if instruction == "welcome":
                    self._welcomed(message.welcome)
                    interval_s = message.welcome.heartbeat_ms / 1000
                    beat = threading.Thread(
                        target=self._beat, args=(interval_s, ended), name="kvpool-heartbeat", daemon=True
                    )
                    beat.start()
                elif instruction == "free_slots":
                    self._apply(message.free_slots)
                elif instruction == "fetch_blocks":
                    if message.fetch_blocks.grant:
                        self._copier.put(message.fetch_blocks)
                    self._orders_applied = max(self._orders_applied, message.fetch_blocks.number)
                elif instruction == "mode":
                    self._set_mode(message.mode)
                elif instruction == "ready":
                    self.ready.set()
                    log.info("node_ready", node=self._node_id)
        finally:
            ended.set()
            self._out.put(None)
            call.cancel()  # type: ignore[no-untyped-call]
            if beat is not None:
                beat.join()

    def _set_mode(self, mode: membership_pb2.NodeMode) -> None:
        log.info("node_mode", node=self._node_id, draining=mode.draining, leave=mode.leave)
        self._store.draining = mode.draining
        if mode.leave:
            self._on_leave()

    def _outgoing(self) -> Iterator[membership_pb2.FromNode]:
        out = self._out
        while (message := out.get()) is not None:
            yield message

    def _hello(self) -> membership_pb2.FromNode:
        hello = membership_pb2.NodeHello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            endpoints=self._endpoints,
            segments=self.segments(),
            protocol=PROTOCOL_VERSION,
            version=__version__,
        )
        return membership_pb2.FromNode(hello=hello)

    def _welcomed(self, welcome: membership_pb2.NodeWelcome) -> None:
        if welcome.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"the service speaks version {welcome.protocol}, this node {PROTOCOL_VERSION}")
        if welcome.incarnation != self._meta_incarnation:
            # Another service numbers its orders anew.
            self._meta_incarnation, self._orders_applied = welcome.incarnation, 0
        for store in self._store.tiers:
            store.in_doubt = False
        session = NodeSession(welcome.incarnation, welcome.session, welcome.grant_key)
        self._link.follow(session)
        self._obey(session)
        for store in self._store.tiers:
            if not store.off:
                self._announce(store)
        done = membership_pb2.InventoryDone(orders_applied=self._orders_applied)
        self._out.put(membership_pb2.FromNode(inventory_done=done))
        if self._store.draining:
            self._out.put(membership_pb2.FromNode(draining=membership_pb2.NodeDraining()))

    def _obey(self, session: NodeSession | None) -> None:
        for store in self._store.tiers:
            store.session = session
            store.read_session = session or store.read_session

    def _announce(self, store: NodeStore) -> None:
        failpoint("node.inventory.before_scan")
        headers = store.inventory()
        for some in headers.by_namespace():
            namespace_id = some.records["namespace"][0].tobytes()
            document = store.book.get(namespace_id)
            if document is None:
                log.warning("namespace_unknown", namespace=namespace_id.hex()[:8], slots=len(some))
                store.free_headers(some)
                continue
            for start in range(0, len(some), INVENTORY_PART_BLOCKS):
                part = _inventory(store, document, some.select(slice(start, start + INVENTORY_PART_BLOCKS)))
                self._out.put(membership_pb2.FromNode(inventory=part))
                failpoint("node.inventory.mid_parts")

    def _apply(self, orders: membership_pb2.FreeSlots) -> None:
        failpoint("node.orders.before_apply")
        columns = (orders.number, orders.segment_id, orders.slot, orders.generation, orders.rest)
        free = [FreeSlot(*row) for row in zip(*columns, strict=True)]
        for store in self._store.tiers:
            store.apply(free)
        failpoint("node.orders.after_apply")
        self._orders_applied = max(self._orders_applied, *orders.number)

    def _beat(self, interval_s: float, ended: threading.Event) -> None:
        while not ended.wait(interval_s):
            for store in self._store.tiers:
                store.expire()
            if any(store.in_doubt for store in self._store.tiers) and self._call is not None:
                log.warning("commit_unanswered", node=self._node_id)
                self._call.cancel()  # type: ignore[no-untyped-call]
                return
            self.report()

    def segments(self) -> list[common_pb2.Segment]:
        """The node's segments as others see them."""
        return [_segment(store) for store in self._store.tiers]


def _segment(store: NodeStore) -> common_pb2.Segment:
    segment, stats = store.segment, store.stats()
    return common_pb2.Segment(
        number=NO_NUMBER,
        segment_id=segment.segment_id,
        medium=segment.medium,
        capacity_bytes=segment.size_bytes,
        used_bytes=stats.used_bytes,
        blocks=stats.slots,
        out_of_use_bytes=stats.quarantined_bytes,
        off=store.off,
    )


def _inventory(store: NodeStore, document: bytes, headers: SlotHeaders) -> membership_pb2.Inventory:
    records = headers.records
    return membership_pb2.Inventory(
        segment_id=store.segment.segment_id,
        document=document,
        hashes=records["hash"].tobytes(),
        parents=records["parent"].tobytes(),
        shards=pack(records["shard"], "<u2"),
        slots=pack(headers.pages, "<u4"),
        generations=pack(records["generation"], "<u8"),
        checksums=pack(records["checksum"], "<u8"),
        ages_s=bytes(4 * len(headers)),
    )
