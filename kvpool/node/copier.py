"""Fetches blocks when the metadata service orders it, and commits them like a writer.

They come from other nodes, or from this one: from its memory to its disk and back, on a thread of their own, so that a
disk that is slow, or hangs, holds up nothing else.

Bytes go from the source straight into the slots here, by the transports that clients use. They are accepted by the
checksum that the directory has for the source, compared over these slots; the checksum they are committed with is
another one, since it is bound to the generations here.
"""

import queue
import threading
from collections import Counter
from collections.abc import Sequence
from operator import methodcaller
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import KvpoolError, ProtocolError
from kvpool.core.grants import Grant
from kvpool.core.keys import select_hashes
from kvpool.node.link import MetaLink
from kvpool.node.records import Receiving
from kvpool.node.store import NodeStore
from kvpool.ops.credentials import Credentials
from kvpool.ops.logging import get_logger
from kvpool.transport import ReadBatch, ReadStatus, Transport, Ways, WriteStatus
from kvpool.transport.blocks import Blocks
from kvpool.transport.copying import checksum
from kvpool.transport.deadline import Deadline
from kvpool.transport.once import OpenOnce
from kvpool.v1 import membership_pb2

STREAMS = 2
_SCHEMES = ("inproc", "shm", "ucx", "tcp")
"""Best first, as for clients."""

FETCH_TIMEOUT_S = 10.0
"""Time for one order; a source that does not answer holds up the orders behind it no longer."""

ORDERS_MAX = 64
"""Orders that may wait; the service has a few open at a time, and asks again for what is not carried out."""

OWNER = 1 << 65
"""Names the first lane as a writer, apart from connections and from writers over gRPC; the others follow."""

Number = TypeVar("Number", np.uint32, np.uint64)

log = get_logger(__name__)


def copy_schemes(*, ucx: bool) -> tuple[str, ...]:
    """What a node fetches over; ``ucx`` where it serves that itself."""
    return tuple(scheme for scheme in _SCHEMES if ucx or scheme != "ucx")


class Copier:
    """Carries orders out: those that have to do with the node's disk on one lane, all others on another.

    Args:
        store: Where to, with the disk's beside it.
        link: The metadata service, to give up what cannot be fetched.
        node_id: Who is calling.
        schemes: Transports to fetch over, best first.
        credentials: What proves who is calling, over TLS; None: plaintext.
    """

    def __init__(
        self,
        store: NodeStore,
        link: MetaLink,
        node_id: str,
        schemes: Sequence[str],
        credentials: Credentials | None = None,
    ) -> None:
        self._store = store
        self._ways = Ways(schemes, credentials)
        self._lanes = [_Lane(store, link, node_id, self._ways, OWNER + i) for i in range(len(store.tiers))]

    def put(self, order: membership_pb2.FetchBlocks) -> None:
        """Carry ``order`` out after those before it on its lane."""
        try:
            ends = {order.source_segment_id, self._store.open_grant(order.grant).segment_id}
        except KvpoolError as error:
            _refused(order, error)
            return
        disk = self._store.disk
        self._lanes[-1 if disk is not None and disk.segment.segment_id in ends else 0].put(order)

    def stop(self) -> None:
        """Drop what was not begun, and wait for what was."""
        for lane in self._lanes:
            lane.stop()
        self._ways.close()

    def fetched_bytes(self) -> dict[str, int]:
        """What was fetched from other nodes and committed, by transport."""
        total: Counter[str] = Counter()
        for lane in self._lanes:
            total.update(dict(list(lane.fetched_bytes.items())))
        return dict(total)


class _Lane:
    """Carries orders out one after the other, on a thread of its own, as the writer ``owner``."""

    def __init__(self, store: NodeStore, link: MetaLink, node_id: str, ways: Ways, owner: int) -> None:
        self.fetched_bytes: Counter[str] = Counter()
        self._store = store
        self._owner = owner
        self._link = link
        self._node_id = node_id
        self._ways = ways
        self._orders: queue.SimpleQueue[membership_pb2.FetchBlocks | None] = queue.SimpleQueue()
        self._transports: OpenOnce[int, Transport] = OpenOnce("the node's copier", methodcaller("close"))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-copier", daemon=True)
        self._thread.start()

    def put(self, order: membership_pb2.FetchBlocks) -> None:
        """Carry ``order`` out after those before it; dropped when too many wait."""
        if self._orders.qsize() < ORDERS_MAX:
            self._orders.put(order)
        else:
            log.warning("fetch_dropped", source=order.source_node_id, waiting=ORDERS_MAX)

    def stop(self) -> None:
        """Drop what was not begun, and wait for what was."""
        self._stopping.set()
        self._orders.put(None)
        self._transports.close()
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if self._stopping.is_set():
                continue
            try:
                self._carry_out(order)
            except (KvpoolError, MemoryError) as error:
                # Of an older session, draining, out of reach: nothing was promised for long.
                _refused(order, error)

    def _carry_out(self, order: membership_pb2.FetchBlocks) -> None:
        grant = self._store.open_grant(order.grant)
        if not len(order.slot) == len(order.generation) == len(order.checksum) == grant.count:
            raise ProtocolError(f"an order to fetch {grant.count} blocks from {len(order.slot)} slots; give one each")
        try:
            fetched = self._fetch(order, grant)
        finally:
            self._store.of(grant.segment_id).drop_owner(self._owner)
            self._link.abort(grant.reservation, [])  # what was committed is not in it any more
        log.info("blocks_fetched", source=order.source_node_id, blocks=fetched, of=grant.count)

    def _fetch(self, order: membership_pb2.FetchBlocks, grant: Grant) -> int:
        """Read and commit the blocks of one order; how many were committed."""
        deadline = Deadline(min(FETCH_TIMEOUT_S, grant.ttl_ms / 1000))
        transport = self._transport(order, deadline)
        store = self._store.of(grant.segment_id)
        slots, generations = store.prepare(order.grant, self._owner)
        opened = np.flatnonzero(slots != NO_SLOT)
        places = store.begin_receive(slots[opened], generations[opened], self._owner)
        sound = [False] * len(places)
        try:
            sound = self._read(transport, order, grant, opened.tolist(), places, deadline)
            checksums = [checksum([p.view], p.seed) if p and s else 0 for p, s in zip(places, sound, strict=True)]
        finally:
            store.end_receive([(p, s) for p, s in zip(places, sound, strict=True) if p is not None])
        good = np.array(sound, np.bool_)
        where = (grant.segment_id, grant.reservation, self._owner)
        written = (slots[opened][good], generations[opened][good], np.array(checksums, np.uint64)[good])
        committed = store.commit_slots(*where, *written).count(WriteStatus.COMMITTED) if good.any() else 0
        if committed and order.source_node_id != self._node_id:
            self.fetched_bytes[transport.name] += committed * grant.block_bytes
        return committed

    def _read(
        self,
        transport: Transport,
        order: membership_pb2.FetchBlocks,
        grant: Grant,
        blocks: list[int],
        places: list[Receiving | None],
        deadline: Deadline,
    ) -> list[bool]:
        """Read ``blocks`` of the order into their places; which of these hold the right bytes now."""
        here = [i for i, place in enumerate(places) if place is not None]
        sound = [False] * len(places)
        if not here:
            return sound
        chosen = [blocks[i] for i in here]
        batch = ReadBatch(
            segment_id=order.source_segment_id,
            namespace_seed=int.from_bytes(grant.namespace[:8], "little"),
            block_bytes=grant.block_bytes,
            shard=grant.shard,
            hashes=select_hashes(grant.hashes, chosen),
            slots=_column(order.slot, np.uint32, chosen),
            generations=_column(order.generation, np.uint64, chosen),
            checksums=_column(order.checksum, np.uint64, chosen),
            destinations=Blocks(grant.block_bytes, pieces=[[place.view] for place in places if place is not None]),
            grant=order.source_grant,
        )
        statuses = transport.read(batch, deadline)
        for i, status in zip(here, statuses, strict=True):
            sound[i] = status == ReadStatus.OK
        if ReadStatus.FAILED in statuses:
            self._transports.drop(order.source_incarnation)
        return sound

    def _transport(self, order: membership_pb2.FetchBlocks, deadline: Deadline) -> Transport:
        def open_source() -> Transport:
            where = (order.source_node_id, list(order.source_endpoints))
            return self._ways.open(*where, f"node:{self._node_id}", order.source_incarnation, STREAMS, deadline)

        return self._transports.get(order.source_incarnation, open_source, deadline)


def _refused(order: membership_pb2.FetchBlocks, error: Exception) -> None:
    log.info("fetch_refused", source=order.source_node_id, error=str(error))


def _column(values: Sequence[int], dtype: type[Number], chosen: list[int]) -> NDArray[Number]:
    return np.array(values, dtype)[chosen]
