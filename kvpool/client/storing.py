"""Storing: reserve places, write each node's grants by its transport, give back what failed.

A long slice is reserved in steps: while the blocks of one are written, the directory places the next.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpool.client.results import Reservation, StoreResult, WriteResult
from kvpool.core.directory import Want
from kvpool.core.errors import KvpoolError, UnavailableError, UsageError
from kvpool.core.keys import NO_PARENT, select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.transport import WriteBatch, WriteStatus
from kvpool.transport.blocks import Blocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import (
    NONE_INDEX,
    AbortRequest,
    Done,
    ReserveReply,
    ReserveRequest,
    SegmentGrant,
    unpack,
)

if TYPE_CHECKING:
    from kvpool.client.keyspace import Keyspace

STEP_BLOCKS = 256
"""Blocks reserved at a time by a store."""

CROWDED_TRIES = 3
"""Further tries when a node's free pages are too scattered; the directory makes a hole before each."""


def reserve_blocks(keyspace: "Keyspace", packed: bytes, first: int, parent: bytes, deadline: Deadline) -> Reservation:
    """See `Keyspace.reserve`."""
    request = _request(keyspace, packed, first, parent)
    # Asking again could reserve twice; the first answer's places would only come back at their deadline.
    reply = keyspace.call(request, ReserveReply, deadline, again=False)
    return _reservation(keyspace, request, reply)


def abort_blocks(
    keyspace: "Keyspace",
    reservation: Reservation,
    blocks: Sequence[int] | None,
    deadline: Deadline,
    *,
    crowded: bool = False,
) -> None:
    """See `Keyspace.abort`."""
    if not reservation.number:
        return
    chosen = b"" if blocks is None else select_hashes(reservation.hashes, sorted(blocks))
    with suppress(UnavailableError):  # then the reservation runs out by itself
        keyspace.client.meta.call(AbortRequest(reservation.number, chosen, crowded), Done, deadline, again=False)


def write_shard(
    keyspace: "Keyspace", reservation: Reservation, sources: Blocks, shard: int, deadline: Deadline
) -> WriteResult:
    """See `Keyspace.write`."""
    committed: list[int] = []
    failed: list[int] = []
    crowded = False
    by_segment: dict[int, list[SegmentGrant]] = {}
    for grant in reservation.grants:
        if grant.shard == shard:
            by_segment.setdefault(grant.segment, []).append(grant)
    for number, grants in by_segment.items():
        blocks = [unpack("blocks", grant.blocks, "<u4", len(grant.blocks) // 4).tolist() for grant in grants]
        for some, statuses in zip(
            blocks, _write_segment(keyspace, reservation, number, grants, blocks, sources, deadline), strict=True
        ):
            crowded |= WriteStatus.NO_SLOT in statuses
            for block, status in zip(some, statuses, strict=True):
                (committed if status == WriteStatus.COMMITTED else failed).append(block)
    return WriteResult(tuple(committed), tuple(failed), crowded)


def store_blocks(keyspace: "Keyspace", packed: bytes, sources: Blocks, first: int, deadline: Deadline) -> StoreResult:
    """See `Keyspace.store`."""
    store = _Store(keyspace, packed, sources, first, deadline)
    try:
        store.run()
    except UsageError:
        raise
    except KvpoolError:
        pass  # what was stored stands; the rest counts as refused
    return store.result()


class _Store:
    """One store, step by step, and what came of it."""

    def __init__(self, keyspace: "Keyspace", packed: bytes, sources: Blocks, first: int, deadline: Deadline) -> None:
        self._keyspace = keyspace
        self._packed = packed
        self._sources = sources
        self._first = first
        self._deadline = deadline
        self._stored: set[int] = set()
        self._existing = self._in_flight = 0
        self._missing_from: int | None = None

    def run(self) -> None:
        """Store everything, or up to what cannot be."""
        starts = list(range(0, len(self._sources), STEP_BLOCKS))
        reservation = reserve_blocks(self._keyspace, self._upto(starts[0]), self._first, NO_PARENT, self._deadline)
        if len(starts) == 1:
            self._write(reservation, 0)
            return
        with self._keyspace.client.meta.find(self._deadline).connection(self._deadline.left_s()) as connection:
            for start, following in zip(starts, [*starts[1:], None], strict=True):
                complete = reservation.missing_from is None and Want.NO_ROOM not in reservation.wants
                if following is not None and complete:
                    request = _request(self._keyspace, self._upto(following), self._first + following, NO_PARENT)
                    connection.post(request, self._deadline.left_s())
                self._write(reservation, start)
                if following is None or not complete:
                    return
                reply = connection.collect(ReserveReply, self._deadline.left_s())
                reservation = _reservation(self._keyspace, request, reply)

    def result(self) -> StoreResult:
        """The sum of all steps."""
        stored = len(self._stored)
        refused = len(self._sources) - stored - self._existing - self._in_flight
        self._keyspace.client.counters.refused(refused)
        return StoreResult(
            stored=stored,
            existing=self._existing,
            in_flight=self._in_flight,
            refused=refused,
            missing_from=self._missing_from,
            size_bytes=stored * self._keyspace.namespace.block_bytes,
        )

    def _upto(self, start: int) -> bytes:
        """The chain up to the end of the step that begins at ``start``."""
        return self._packed[: (self._first + start + STEP_BLOCKS) * HASH_BYTES]

    def _write(self, reservation: Reservation, start: int) -> None:
        self._missing_from = reservation.missing_from
        self._existing += reservation.wants.count(Want.EXISTS)
        self._in_flight += reservation.wants.count(Want.IN_FLIGHT)
        end = min(start + STEP_BLOCKS, len(self._sources))
        sources = self._sources.select(range(start, end))
        for tries_left in range(CROWDED_TRIES, -1, -1):
            written = write_shard(self._keyspace, reservation, sources, 0, self._deadline)
            self._stored.update(start + block for block in written.committed)
            if not written.failed:
                return
            abort_blocks(self._keyspace, reservation, written.failed, self._deadline, crowded=written.crowded)
            if not written.crowded or not tries_left:
                return
            # Most of what was written exists now; only the rest is wanted again.
            upto = self._upto(start)
            reservation = reserve_blocks(self._keyspace, upto, self._first + start, NO_PARENT, self._deadline)


def _request(keyspace: "Keyspace", packed: bytes, first: int, parent: bytes) -> ReserveRequest:
    version = keyspace.client.meta.topology.version
    return ReserveRequest(keyspace.namespace.id, packed, first, parent, 0, version)


def _reservation(keyspace: "Keyspace", request: ReserveRequest, reply: ReserveReply) -> Reservation:
    keyspace.client.meta.learn(reply.topology)
    missing_from = None if reply.missing_from == NONE_INDEX else reply.missing_from
    hashes = request.hashes[request.first * HASH_BYTES :]
    return Reservation(reply.reservation, request.first, hashes, reply.wants, missing_from, reply.grants)


def _write_segment(
    keyspace: "Keyspace",
    reservation: Reservation,
    number: int,
    grants: list[SegmentGrant],
    blocks: list[list[int]],
    sources: Blocks,
    deadline: Deadline,
) -> list[bytearray]:
    """Write the grants of one segment; ``blocks`` are their indexes into the slice."""
    client, namespace = keyspace.client, keyspace.namespace
    try:
        node, segment = client.nodes.find(number, client.meta.topology)
        transport = client.nodes.transport(node, deadline)
        batches = [
            WriteBatch(
                grant=grant.grant,
                reservation=reservation.number,
                segment_id=segment.segment_id,
                namespace_seed=namespace.seed,
                block_bytes=namespace.block_bytes,
                shard=grant.shard,
                hashes=select_hashes(reservation.hashes, some),
                sources=sources.select(some),
            )
            for grant, some in zip(grants, blocks, strict=True)
        ]
        statuses = transport.write(batches, deadline)
    except KvpoolError:
        return [bytearray([WriteStatus.FAILED]) * len(some) for some in blocks]
    committed = sum(status.count(WriteStatus.COMMITTED) for status in statuses)
    client.counters.stored(transport.name, committed * namespace.block_bytes)
    return statuses
