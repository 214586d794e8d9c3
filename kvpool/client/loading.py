"""Loading: locate, read from each segment by its node's transport, and tell the directory of what was not there.

A long slice is loaded in steps: while the blocks of one are read, the next ones are located.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.client.far import read_batch
from kvpool.client.nodes import Use
from kvpool.client.results import LoadResult
from kvpool.core.directory import DISK, MissReason
from kvpool.core.errors import DeadlineError, KvpoolError, OverloadedError, UsageError
from kvpool.core.keys import hash_at, select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.ops.failpoints import failpoint
from kvpool.transport import ReadBatch, ReadStatus, Transport
from kvpool.transport.blocks import Blocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import (
    Done,
    LocateReply,
    LocateRequest,
    NodeInfo,
    ReportBadRequest,
    SegmentInfo,
    unpack,
)

if TYPE_CHECKING:
    from kvpool.client.keyspace import Keyspace

STEP_BLOCKS = 512
"""Blocks located at a time."""

PATIENCE = 0.5
"""Part of the time left that a read gets while there are other copies to turn to."""

_REASONS = {
    ReadStatus.GONE: MissReason.EVICTED,
    ReadStatus.BAD: MissReason.VERIFY_FAILED,
    ReadStatus.FAILED: MissReason.NODE_DOWN,
    ReadStatus.LATE: MissReason.OVER_DEADLINE,
    ReadStatus.REFUSED: MissReason.NODE_DOWN,
}


@dataclass(frozen=True, slots=True)
class _Copies:
    """Where the located blocks lie: one element a copy."""

    block: NDArray[Any]
    segment: NDArray[Any]
    slot: NDArray[Any]
    generation: NDArray[Any]
    checksum: NDArray[Any]

    def only(self, wanted: NDArray[np.bool_]) -> "_Copies":
        columns = (self.block, self.segment, self.slot, self.generation, self.checksum)
        return _Copies(*(column[wanted] for column in columns))


def load_blocks(
    keyspace: "Keyspace",
    packed: bytes,
    destinations: Blocks,
    first: int,
    shard: int,
    deadline: Deadline,
) -> LoadResult:
    """See `Keyspace.load`; ``packed`` ends with the last block wanted."""
    client = keyspace._client
    steps = [range(i, min(i + STEP_BLOCKS, len(destinations))) for i in range(0, len(destinations), STEP_BLOCKS)]
    follow = client._tracer.follow
    calls = [follow(partial(_locate, keyspace, packed, first, step, shard, deadline)) for step in steps]
    reasons: list[MissReason | None] = []
    for step, located in zip(steps, client._streams.ahead(calls), strict=True):
        if isinstance(located, MissReason):
            reasons += [located] * len(step)
            continue
        hashes = packed[(first + step.start) * HASH_BYTES : (first + step.stop) * HASH_BYTES]
        load = _Load(keyspace, hashes, destinations.select(step), shard, deadline)
        found = load.read(located)
        if load.was_refused:  # with grants that are over: another locate brings new ones
            keyspace._grants.forget()
            again = _locate(keyspace, packed, first, step, shard, deadline)
            found = found if isinstance(again, MissReason) else load.read(again)
        reasons += found
    loaded = next((i for i, reason in enumerate(reasons) if reason is not None), len(reasons))
    if loaded < len(reasons):
        client._counters.missed(reasons)
    return LoadResult(loaded, tuple(reasons), reasons.count(None) * keyspace.namespace.block_bytes)


def _whence(node: NodeInfo, segment: SegmentInfo, transport: Transport) -> dict[str, str]:
    """Where blocks are read from, for traces."""
    return {"node": node.node_id, "tier": segment.medium, "transport": transport.name}


def miss_reason(error: KvpoolError) -> MissReason:
    """What a failure on the data path means to the caller."""
    if isinstance(error, OverloadedError):
        return MissReason.OVERLOADED
    return MissReason.OVER_DEADLINE if isinstance(error, DeadlineError) else MissReason.NODE_DOWN


def _locate(
    keyspace: "Keyspace", packed: bytes, first: int, step: range, shard: int, deadline: Deadline
) -> LocateReply | MissReason:
    """Where the blocks of ``step`` lie, or why nobody can say; raises UsageError."""
    meta, tracer = keyspace._client._meta, keyspace._client._tracer
    upto = packed[: (first + step.stop) * HASH_BYTES]
    request = LocateRequest(
        keyspace.namespace.id, upto, first + step.start, shard, meta.topology.version, keyspace._grants.version
    )
    try:
        with tracer.span("kvpool.locate", blocks=len(step)):
            reply = keyspace._call(request, LocateReply, deadline)
    except UsageError:
        raise
    except KvpoolError as error:
        return miss_reason(error)
    meta.learn(reply.topology)
    keyspace._grants.learn(reply.grants)
    return reply


def _copies(reply: LocateReply) -> _Copies:
    count = len(reply.slots) // 4
    return _Copies(
        unpack("blocks", reply.blocks, "<u4", count),
        unpack("segments", reply.segments, "<u2", count),
        unpack("slots", reply.slots, "<u4", count),
        unpack("generations", reply.generations, "<u8", count),
        unpack("checksums", reply.checksums, "<u8", count),
    )


class _Load:
    """One step of a load: reads copies until every block has its bytes or no copy is left."""

    def __init__(
        self, keyspace: "Keyspace", hashes: bytes, destinations: Blocks, shard: int, deadline: Deadline
    ) -> None:
        self._keyspace = keyspace
        self._hashes = hashes
        self._destinations = destinations
        self._shard = shard
        self._deadline = deadline
        self._reasons: list[MissReason | None] = []
        self.was_refused = False

    def read(self, reply: LocateReply) -> list[MissReason | None]:
        """Read each block from its best copy, and what fails from the next one; why each was not loaded, or None."""
        copies = _copies(reply)
        self._reasons = [MissReason(reply.reason or MissReason.COLD)] * len(self._destinations)
        if len(copies.block) == reply.count:
            self._read_each(copies, self._deadline)  # one copy each: the usual case
            return self._reasons
        while len(copies.block):
            chosen = self._best(copies)
            rest = copies.only(~chosen)
            try:
                # A node that does not answer must leave time for another one.
                deadline = self._deadline.part(PATIENCE) if len(rest.block) else self._deadline
            except DeadlineError:
                break  # each block has its reason already
            self._read_each(copies.only(chosen), deadline)
            copies = rest.only(np.array([self._reasons[b] is not None for b in rest.block.tolist()], np.bool_))
        return self._reasons

    def _best(self, copies: _Copies) -> NDArray[np.bool_]:
        """One copy of each block: the one that is nearest, and there the one whose node has the least to do."""
        client = self._keyspace._client
        numbers = np.unique(copies.segment)
        costs = [client._nodes.cost(number, client._meta.topology) for number in numbers.tolist()]
        place = np.empty(len(numbers), np.int64)
        place[sorted(range(len(numbers)), key=costs.__getitem__)] = np.arange(len(numbers))
        order = np.lexsort((place[np.searchsorted(numbers, copies.segment)], copies.block))
        _, first_of = np.unique(copies.block[order], return_index=True)
        chosen = np.zeros(len(copies.block), np.bool_)
        chosen[order[first_of]] = True
        return chosen

    def _read_each(self, copies: _Copies, deadline: Deadline) -> None:
        segments = set(copies.segment.tolist())
        for number in segments:
            some = copies if len(segments) == 1 else copies.only(copies.segment == number)
            self._read_segment(number, some, deadline)

    def _read_segment(self, number: int, copies: _Copies, deadline: Deadline) -> None:
        client, blocks = self._keyspace._client, copies.block.tolist()
        try:
            node, segment = client._nodes.find(number, client._meta.topology)
            transport = client._nodes.transport(node, deadline, Use.READ)
            batch = self._batch(node, segment.segment_id, copies, blocks, self._destinations.select(blocks))
            failpoint("client.read.before_copy")
            with (
                client._nodes.reading(node, len(blocks) * batch.block_bytes),
                client._tracer.span("kvpool.read", **_whence(node, segment, transport), blocks=len(blocks)),
            ):
                began_s = time.perf_counter()
                statuses = read_batch(transport, batch, segment.medium, deadline)
                client._counters.times["read"].observe(time.perf_counter() - began_s)
        except KvpoolError as error:
            for block in blocks:
                self._reasons[block] = miss_reason(error)
            return
        self.was_refused |= ReadStatus.REFUSED in statuses
        failed = ReadStatus.FAILED in statuses or ReadStatus.LATE in statuses
        client._nodes.judge(node, Use.READ, deadline, failed=failed)
        way = DISK if segment.medium == DISK else transport.name
        verified, bad = statuses.count(ReadStatus.OK), statuses.count(ReadStatus.BAD)
        with client._tracer.span("kvpool.verify", verified_blocks=verified, bad_blocks=bad):
            self._take(way, segment.segment_id, copies, blocks, statuses)
            for i in np.flatnonzero(np.frombuffer(statuses, np.uint8) == ReadStatus.BAD).tolist():
                with suppress(KvpoolError):  # the client is closing
                    if self._again(transport, node, segment.segment_id, copies, blocks, i) == ReadStatus.BAD:
                        self._report(segment.segment_id, blocks[i], copies, i)

    def _again(
        self, transport: Transport, node: NodeInfo, segment_id: bytes, copies: _Copies, blocks: list[int], i: int
    ) -> int:
        """Read a bad copy once more into memory of our own.

        The caller's may be at fault, written by another thread or given for two blocks: good copies must not be
        dropped for that.
        """
        chosen = np.arange(len(blocks)) == i
        own = Blocks(self._destinations.block_bytes, whole=np.empty(self._destinations.block_bytes, np.uint8))
        batch = self._batch(node, segment_id, copies.only(chosen), blocks[i : i + 1], own)
        return transport.read(batch, self._deadline)[0]

    def _batch(
        self, node: NodeInfo, segment_id: bytes, copies: _Copies, blocks: list[int], destinations: Blocks
    ) -> ReadBatch:
        namespace = self._keyspace.namespace
        return ReadBatch(
            segment_id=segment_id,
            namespace_seed=namespace.seed,
            block_bytes=namespace.block_bytes,
            shard=self._shard,
            hashes=select_hashes(self._hashes, blocks),
            slots=copies.slot,
            generations=copies.generation,
            checksums=copies.checksum,
            destinations=destinations,
            grant=self._keyspace._grants.of(node.incarnation),
        )

    def _take(self, way: str, segment_id: bytes, copies: _Copies, blocks: list[int], statuses: bytearray) -> None:
        client = self._keyspace._client
        good = statuses.count(ReadStatus.OK)
        client._counters.loaded(way, good * self._keyspace.namespace.block_bytes)
        if good == len(blocks):
            for block in blocks:
                self._reasons[block] = None
            return
        for i, block in enumerate(blocks):
            status = ReadStatus(statuses[i])
            self._reasons[block] = _REASONS.get(status)
            if status == ReadStatus.GONE:
                self._report(segment_id, block, copies, i)
        client._counters.unverified(statuses.count(ReadStatus.BAD))

    def _report(self, segment_id: bytes, block: int, copies: _Copies, i: int) -> None:
        block_hash, place = hash_at(self._hashes, block), (int(copies.slot[i]), int(copies.generation[i]))
        request = ReportBadRequest(self._keyspace.namespace.id, block_hash, segment_id, *place)
        with suppress(KvpoolError):  # whoever meets the block next reports it
            self._keyspace._client._meta.call(request, Done, self._deadline, again=False)
