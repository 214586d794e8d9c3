"""Orders to nodes, of all namespaces in one numbered row: what the service that holds a node's stream sends."""

import threading
from collections import deque
from dataclasses import dataclass, field

from kvpool.core.directory import FreeSlot, Order
from kvpool.meta.store.packing import unpack_orders
from kvpool.meta.store.pool import Pool

FIRST_NUMBER_BITS = 32
"""Each time a node joins, its row begins above all numbers of earlier ones, which it may still acknowledge."""

Box = tuple[bytes, bytes]
"""(namespace id, segment id)."""


@dataclass(slots=True)
class _Row:
    """Orders to one node since it joined: those sent and not acknowledged, and how far each outbox has been read."""

    last_number: int
    pending: deque[tuple[FreeSlot, Box, int]] = field(default_factory=deque)
    read: dict[Box, int] = field(default_factory=dict)


class Outboxes:
    """The rows of the nodes that have joined here. Thread-safe."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}

    def begin(self, node_id: str) -> None:
        """The node has joined here: what it has not acknowledged is sent again."""
        (times,) = self._pool.link.run([("HINCRBY", f"{self._pool.epoch.pool}joins", node_id, 1)])
        with self._lock:
            self._rows[node_id] = _Row(int(times) << FIRST_NUMBER_BITS)

    def orders(self, node_id: str, after: int, most: int) -> list[Order]:
        """See `Directory.orders`."""
        row = self._rows.get(node_id)
        if row is None:
            return []
        with self._lock:
            self._read(node_id, row, most)
            pending: list[Order] = [order for order, _, _ in row.pending if order.number > after]
            return pending[:most]

    def acknowledge(self, node_id: str, number: int) -> None:
        """See `Directory.acknowledge`."""
        row = self._rows.get(node_id)
        if row is None:
            return
        applied: dict[Box, int] = {}
        with self._lock:
            while row.pending and row.pending[0][0].number <= number:
                _, box, inner = row.pending.popleft()
                applied[box] = inner
        prefix = self._pool.epoch.prefix
        if applied:
            self._pool.link.calls([(prefix(n), "acknowledge", (s, inner)) for (n, s), inner in applied.items()])

    def pending(self) -> int:
        """Orders that were sent from here and not acknowledged."""
        with self._lock:
            return sum(len(row.pending) for row in self._rows.values())

    def _read(self, node_id: str, row: _Row, most: int) -> None:
        self._pool.read_namespaces()
        own = [r.segment_id for r in self._pool.segments().values() if r.node_id == node_id and r.open]
        boxes = [(known.namespace.id, segment_id) for known in self._pool.all_known() for segment_id in own]
        if not boxes:
            return
        prefix = self._pool.epoch.prefix
        wanted = [(prefix(n), "orders", (s, row.read.get((n, s), 0), most)) for n, s in boxes]
        for box, packed in zip(boxes, self._pool.link.calls(wanted), strict=True):
            for order in unpack_orders(packed, box[1]):
                row.last_number += 1
                row.read[box] = order.number
                row.pending.append((order._replace(number=row.last_number), box, order.number))
