"""Storing: reserve places, write each node's grants by its transport, give back what failed.

A long slice is stored in steps: while the blocks of some are written, the directory places the next.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvpool.client.far import within_reach
from kvpool.client.nodes import Use
from kvpool.client.results import Reservation, StoreResult, WriteResult
from kvpool.core.directory import Want
from kvpool.core.errors import CapacityError, KvpoolError, ProtocolError, UnavailableError, UsageError
from kvpool.core.keys import NO_PARENT, select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.ops.failpoints import failpoint
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

STEP_BLOCKS = 1024
STEP_BYTES = 64 << 20
"""Blocks and bytes that a store reserves and writes at a time."""

CROWDED_TRIES = 5
"""Further tries when a node's free pages are too scattered; the directory makes a hole before each."""


def step_blocks(block_bytes: int) -> int:
    """Blocks of one step of a store."""
    return max(1, min(STEP_BLOCKS, STEP_BYTES // block_bytes))


def reserve_blocks(keyspace: "Keyspace", packed: bytes, first: int, parent: bytes, deadline: Deadline) -> Reservation:
    """See `Keyspace.reserve`."""
    meta = keyspace._client._meta
    request = ReserveRequest(keyspace.namespace.id, packed, first, parent, 0, meta.topology.version)
    # Asking again could reserve twice; the first answer's places would only come back at their deadline.
    with keyspace._client._tracer.span("kvpool.reserve", blocks=len(packed) // HASH_BYTES - first) as span:
        reply = keyspace._call(request, ReserveReply, deadline, again=False)
        span.set(reservation=reply.reservation)
    _check_reply(reply, len(packed) // HASH_BYTES, first)
    meta.learn(reply.topology)
    failpoint("client.put.after_reserve")
    missing_from = None if reply.missing_from == NONE_INDEX else reply.missing_from
    return Reservation(
        keyspace.namespace.id,
        reply.reservation,
        first,
        packed[first * HASH_BYTES :],
        reply.wants,
        missing_from,
        reply.grants,
        meta.topology.version,
    )


def _check_reply(reply: ReserveReply, chain: int, first: int) -> None:
    """Raises ProtocolError for an answer that is none for blocks ``first``... of a chain of so many."""
    blocks = chain - first
    named = [unpack("blocks", grant.blocks, "<u4", len(grant.blocks) // 4) for grant in reply.grants]
    sound = (
        len(reply.wants) == (blocks if reply.missing_from == NONE_INDEX else 0)
        and max(reply.wants, default=0) <= max(Want)
        and NONE_INDEX <= reply.missing_from < chain
        and all(len(some) == 0 or int(some.max()) < blocks for some in named)
    )
    if not sound:
        raise ProtocolError(f"a reservation that is none for blocks {first} to {chain - 1}")


def abort_blocks(
    keyspace: "Keyspace",
    reservation: Reservation,
    blocks: Sequence[int] | None,
    deadline: Deadline,
    *,
    crowded: bool = False,
) -> None:
    """See `Keyspace.abort`."""
    if not reservation.number or (blocks is not None and not blocks):
        return
    chosen = b"" if blocks is None else select_hashes(reservation.hashes, sorted(blocks))
    with suppress(UnavailableError, CapacityError):  # then the reservation runs out by itself
        keyspace._client._meta.call(AbortRequest(reservation.number, chosen, crowded), Done, deadline, again=False)


def write_shard(
    keyspace: "Keyspace", reservation: Reservation, sources: Blocks, shard: int, deadline: Deadline
) -> WriteResult:
    """See `Keyspace.write`."""
    meta = keyspace._client._meta
    if reservation.grants and reservation.topology != meta.topology.version:
        with suppress(KvpoolError):  # then it writes to the nodes that it knows
            meta.refresh(deadline)
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
        self._step = step_blocks(keyspace.namespace.block_bytes)
        self._lock = threading.Lock()
        self._stored = self._existing = self._in_flight = 0
        self._missing_from: int | None = None

    def run(self) -> None:
        """Store everything, or up to what cannot be: some steps are written while the next one is reserved."""
        if self._step >= len(self._sources):
            self._write(self._reserve(0), 0)
            return
        for _ in self._keyspace._client._streams.window(self._steps()):
            pass

    def result(self) -> StoreResult:
        """The sum of all steps."""
        refused = len(self._sources) - self._stored - self._existing - self._in_flight
        self._keyspace._client._counters.refused(refused)
        return StoreResult(
            stored=self._stored,
            existing=self._existing,
            in_flight=self._in_flight,
            refused=refused,
            missing_from=self._missing_from,
            size_bytes=self._stored * self._keyspace.namespace.block_bytes,
        )

    def _steps(self) -> Iterator[Callable[[], None]]:
        """Reserve step by step; each item writes one."""
        for start in range(0, len(self._sources), self._step):
            reservation = self._reserve(start)
            yield self._keyspace._client._tracer.follow(partial(self._write, reservation, start))
            if reservation.missing_from is not None or Want.NO_ROOM in reservation.wants:
                return  # what follows in the chain finds no parent

    def _reserve(self, start: int) -> Reservation:
        upto = self._packed[: (self._first + start + self._step) * HASH_BYTES]
        return reserve_blocks(self._keyspace, upto, self._first + start, NO_PARENT, self._deadline)

    def _write(self, reservation: Reservation, start: int) -> None:
        stored: set[int] = set()
        sources = self._sources.select(range(start, min(start + self._step, len(self._sources))))
        first_answer = reservation
        for tries_left in range(CROWDED_TRIES, -1, -1):
            written = write_shard(self._keyspace, reservation, sources, 0, self._deadline)
            stored.update(written.committed)
            if not written.failed:
                break
            abort_blocks(self._keyspace, reservation, written.failed, self._deadline, crowded=written.crowded)
            if not written.crowded or not tries_left:
                break
            # Most of what was written exists now; only the rest is wanted again.
            reservation = self._reserve(start)
        self._add(first_answer, len(stored))

    def _add(self, reservation: Reservation, stored: int) -> None:
        with self._lock:
            self._stored += stored
            self._existing += reservation.wants.count(Want.EXISTS)
            self._in_flight += reservation.wants.count(Want.IN_FLIGHT)
            if reservation.missing_from is not None:
                self._missing_from = reservation.missing_from


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
    client, namespace = keyspace._client, keyspace.namespace
    try:
        node, segment = client._nodes.find(number, client._meta.topology)
        transport = client._nodes.transport(node, deadline, Use.WRITE)
        reaches_far = transport.reaches_far  # of all batches: some may be moved together
        batches = (
            WriteBatch(
                grant=grant.grant,
                reservation=reservation.number,
                segment_id=segment.segment_id,
                namespace_seed=namespace.seed,
                block_bytes=namespace.block_bytes,
                shard=grant.shard,
                hashes=select_hashes(reservation.hashes, some),
                sources=within_reach(sources.select(some), reaches_far, segment.medium),
            )
            for grant, some in zip(grants, blocks, strict=True)
        )
        where = {"node": node.node_id, "transport": transport.name}
        count = sum(map(len, blocks))
        with client._tracer.span("kvpool.write", **where, reservation=reservation.number, blocks=count):
            began_s = time.perf_counter()
            statuses = transport.write(batches, deadline)
            client._counters.times["write"].observe(time.perf_counter() - began_s)
        statuses += [bytearray([WriteStatus.FAILED]) * len(some) for some in blocks[len(statuses) :]]
    except KvpoolError:
        return [bytearray([WriteStatus.FAILED]) * len(some) for some in blocks]
    client._nodes.judge(node, Use.WRITE, deadline, failed=any(WriteStatus.FAILED in status for status in statuses))
    committed = sum(status.count(WriteStatus.COMMITTED) for status in statuses)
    client._counters.stored(transport.name, committed * namespace.block_bytes)
    return statuses
