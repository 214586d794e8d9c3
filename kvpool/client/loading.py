"""Loading: locate, read from each segment by its node's transport, and tell the directory of what was not there."""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.client.results import LoadResult
from kvpool.core.directory import MissReason
from kvpool.core.errors import DeadlineError, KvpoolError, UsageError
from kvpool.core.keys import select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.transport import ReadBatch, ReadStatus, Transport
from kvpool.transport.blocks import Blocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import Done, LocateReply, LocateRequest, ReportBadRequest, unpack

if TYPE_CHECKING:
    from kvpool.client.keyspace import Keyspace

_REASONS = {
    ReadStatus.GONE: MissReason.EVICTED,
    ReadStatus.BAD: MissReason.VERIFY_FAILED,
    ReadStatus.FAILED: MissReason.NODE_DOWN,
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
    try:
        reply = _locate(keyspace, packed, first, shard, deadline)
    except UsageError:
        raise
    except KvpoolError as error:
        reasons = [miss_reason(error)] * len(destinations)
        client._counters.missed(reasons)
        return LoadResult(0, tuple(reasons), 0)
    why = MissReason(reply.reason) if reply.reason else MissReason.COLD
    load = _Load(keyspace, packed[first * HASH_BYTES :], destinations, shard, deadline, why)
    load.read(_copies(reply), reply.count)
    return load.result()


def miss_reason(error: KvpoolError) -> MissReason:
    """What a failure on the data path means to the caller."""
    return MissReason.OVER_DEADLINE if isinstance(error, DeadlineError) else MissReason.NODE_DOWN


def _locate(keyspace: "Keyspace", packed: bytes, first: int, shard: int, deadline: Deadline) -> LocateReply:
    meta = keyspace._client._meta
    request = LocateRequest(keyspace.namespace.id, packed, first, shard, meta.topology.version)
    reply = keyspace._call(request, LocateReply, deadline)
    meta.learn(reply.topology)
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
    """One load: reads copies until every block has its bytes or no copy is left."""

    def __init__(
        self,
        keyspace: "Keyspace",
        hashes: bytes,
        destinations: Blocks,
        shard: int,
        deadline: Deadline,
        why: MissReason,
    ) -> None:
        self._keyspace = keyspace
        self._hashes = hashes
        self._destinations = destinations
        self._shard = shard
        self._deadline = deadline
        self._reasons: list[MissReason | None] = [why] * len(destinations)

    def read(self, copies: _Copies, blocks: int) -> None:
        """Read each block from its first copy; what fails is tried on the next one."""
        if len(copies.block) == blocks:
            self._read_each(copies)  # one copy each: the usual case
            return
        while len(copies.block):
            _, first_of = np.unique(copies.block, return_index=True)
            chosen = np.zeros(len(copies.block), np.bool_)
            chosen[first_of] = True
            self._read_each(copies.only(chosen))
            rest = copies.only(~chosen)
            copies = rest.only(np.array([self._reasons[b] is not None for b in rest.block.tolist()], np.bool_))

    def result(self) -> LoadResult:
        """What came of it."""
        reasons = self._reasons
        loaded = next((i for i, reason in enumerate(reasons) if reason is not None), len(reasons))
        if loaded < len(reasons):
            self._keyspace._client._counters.missed(reasons)
        size_bytes = reasons.count(None) * self._keyspace.namespace.block_bytes
        return LoadResult(loaded, tuple(reasons), size_bytes)

    def _read_each(self, copies: _Copies) -> None:
        segments = set(copies.segment.tolist())
        for number in segments:
            self._read_segment(number, copies if len(segments) == 1 else copies.only(copies.segment == number))

    def _read_segment(self, number: int, copies: _Copies) -> None:
        client, blocks = self._keyspace._client, copies.block.tolist()
        try:
            node, segment = client._nodes.find(number, client._meta.topology)
            transport = client._nodes.transport(node, self._deadline)
            batch = self._batch(segment.segment_id, copies, blocks)
            statuses = transport.read(batch, self._deadline)
        except KvpoolError as error:
            for block in blocks:
                self._reasons[block] = miss_reason(error)
            return
        self._take(transport, number, copies, blocks, statuses)

    def _batch(self, segment_id: bytes, copies: _Copies, blocks: list[int]) -> ReadBatch:
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
            destinations=self._destinations.select(blocks),
        )

    def _take(self, transport: Transport, number: int, copies: _Copies, blocks: list[int], statuses: bytearray) -> None:
        client = self._keyspace._client
        good = statuses.count(ReadStatus.OK)
        client._counters.loaded(transport.name, good * self._keyspace.namespace.block_bytes)
        if good == len(blocks):
            for block in blocks:
                self._reasons[block] = None
            return
        for i, block in enumerate(blocks):
            status = ReadStatus(statuses[i])
            self._reasons[block] = _REASONS.get(status)
            if status in (ReadStatus.GONE, ReadStatus.BAD):
                self._report(number, block, int(copies.slot[i]), int(copies.generation[i]))
        client._counters.unverified(statuses.count(ReadStatus.BAD))

    def _report(self, segment: int, block: int, slot: int, generation: int) -> None:
        block_hash = self._hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
        request = ReportBadRequest(self._keyspace.namespace.id, block_hash, segment, slot, generation)
        with suppress(KvpoolError):  # whoever meets the block next reports it
            self._keyspace._client._meta.call(request, Done, self._deadline, again=False)
