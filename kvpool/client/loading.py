"""Loading: locate, read from each segment by its node's transport, and tell the directory of what was not there.

A long slice is loaded in steps: while the blocks of one are read, the next ones are located. Blocks in far memory are
only begun in their step, since a device moves them by itself, and ended when all steps have begun.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.client.far import begin_batch
from kvpool.client.nodes import Use
from kvpool.client.results import LoadResult
from kvpool.core.directory import DISK, MissReason
from kvpool.core.errors import DeadlineError, KvpoolError, OverloadedError, UsageError
from kvpool.core.keys import hash_at, select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.ops.failpoints import failpoint
from kvpool.transport import ReadBatch, ReadStatus, Transport
from kvpool.transport.blocks import Blocks, FarBlocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import Done, LocateReply, LocateRequest, ReportBadRequest, unpack

if TYPE_CHECKING:
    from kvpool.client.keyspace import Keyspace

STEP_BLOCKS = 512
"""Blocks located at a time."""

FAR_STEP_BLOCKS, FAR_GROWTH, FAR_STEP_BLOCKS_MAX = 256, 4, 2048
"""For far memory: blocks located first, since its link should not wait for longer, and each step disturbs what the
device computes; how many times as many each further step has; and the most."""

EXPECTED_BLOCKS_MIN = 64
"""Blocks of far memory that are worth getting ready for while they are located."""

PATIENCE = 0.5
"""Part of the time left that a read gets while there are other copies to turn to."""

_REASONS = {
    ReadStatus.GONE: MissReason.EVICTED,
    ReadStatus.BAD: MissReason.VERIFY_FAILED,
    ReadStatus.FAILED: MissReason.NODE_DOWN,
    ReadStatus.LATE: MissReason.OVER_DEADLINE,
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


_NO_COPIES = _Copies(*[np.empty(0, np.int64)] * 5)

_Ending = Callable[[], list[MissReason | None]]
"""Waits for one step of a load; why each of its blocks was not loaded, or None."""


def load_blocks(
    keyspace: "Keyspace",
    packed: bytes,
    destinations: Blocks,
    first: int,
    shard: int,
    deadline: Deadline,
) -> LoadResult:
    """See `Keyspace.load`; ``packed`` ends with the last block wanted."""
    steps = _steps(len(destinations), far=isinstance(destinations, FarBlocks))
    begun: deque[_Ending] = deque()
    reasons: list[MissReason | None] = []
    try:
        requests = [_request(keyspace, packed, first, step, shard) for step in steps]
        for step, located in zip(steps, _locate_all(keyspace, requests, destinations, deadline), strict=True):
            if isinstance(located, MissReason):
                begun.append(partial(_missed, located, len(step)))
                continue
            hashes = packed[(first + step.start) * HASH_BYTES : (first + step.stop) * HASH_BYTES]
            load = _Load(keyspace, hashes, destinations.select(step), shard, deadline)
            begun.append(load.begin(located))
        while begun:
            reasons += begun.popleft()()
    finally:
        for end in begun:
            end()  # nothing may be written any more, whatever went wrong
    held = loaded = reasons.count(None)
    if held < len(reasons):
        loaded = next(i for i, reason in enumerate(reasons) if reason is not None)
        keyspace._client._counters.missed(reasons)
    return LoadResult(loaded, tuple(reasons), held * keyspace.namespace.block_bytes)


def miss_reason(error: KvpoolError) -> MissReason:
    """What a failure on the data path means to the caller."""
    if isinstance(error, OverloadedError):
        return MissReason.OVERLOADED
    return MissReason.OVER_DEADLINE if isinstance(error, DeadlineError) else MissReason.NODE_DOWN


def _steps(blocks: int, *, far: bool) -> list[range]:
    """``range(blocks)`` in steps."""
    steps: list[range] = []
    start = 0
    count, growth, most = (FAR_STEP_BLOCKS, FAR_GROWTH, FAR_STEP_BLOCKS_MAX) if far else (STEP_BLOCKS, 1, STEP_BLOCKS)
    while start < blocks:
        steps.append(range(start, min(start + count, blocks)))
        start, count = start + count, min(count * growth, most)
    return steps


def _locate_all(
    keyspace: "Keyspace", requests: Sequence[LocateRequest], destinations: Blocks, deadline: Deadline
) -> Iterator[LocateReply | MissReason]:
    """Where the blocks of each step lie, or why nobody can say; raises UsageError.

    The service works on one step while the caller uses the answer for the one before. Once that fails, each step is
    asked for by itself.
    """
    expected = isinstance(destinations, FarBlocks) and len(destinations) >= EXPECTED_BLOCKS_MIN
    meanwhile = destinations.expect_load if isinstance(destinations, FarBlocks) and expected else _nothing
    answered = 0
    reason: MissReason | None = None
    if len(requests) > 1 or expected:
        try:
            for reply in keyspace._calls(requests, LocateReply, deadline, meanwhile):
                keyspace._client._meta.learn(reply.topology)
                answered += 1
                yield reply
        except (OverloadedError, DeadlineError) as error:
            reason = miss_reason(error)  # asking again cannot help
        except KvpoolError:
            pass
    if reason is not None:
        answered += 1
        yield reason
    for request in requests[answered:]:
        yield _locate(keyspace, request, deadline)


def _request(keyspace: "Keyspace", packed: bytes, first: int, step: range, shard: int) -> LocateRequest:
    """What asks where the blocks of ``step`` lie."""
    upto, version = packed[: (first + step.stop) * HASH_BYTES], keyspace._client._meta.topology.version
    return LocateRequest(keyspace.namespace.id, upto, first + step.start, shard, version)


def _locate(keyspace: "Keyspace", request: LocateRequest, deadline: Deadline) -> LocateReply | MissReason:
    """The answer to one request, or why there is none; raises UsageError."""
    try:
        reply = keyspace._call(request, LocateReply, deadline)
    except UsageError:
        raise
    except KvpoolError as error:
        return miss_reason(error)
    keyspace._client._meta.learn(reply.topology)
    return reply


def _missed(reason: MissReason, blocks: int) -> list[MissReason | None]:
    return [reason] * blocks


def _nothing() -> None:
    """What ends a read that did not begin."""


def _indexes(blocks: NDArray[np.uint32]) -> Sequence[int]:
    """Ascending indexes; a range where they follow one another, as they mostly do."""
    first, last = int(blocks[0]), int(blocks[-1])
    return range(first, last + 1) if last - first + 1 == len(blocks) else blocks.tolist()


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

    def begin(self, reply: LocateReply) -> _Ending:
        """Begin to read each block from its best copy.

        What is returned must be called: it ends that, reads what failed from the next copy, and answers why each block
        was not loaded, or None.
        """
        copies = _copies(reply)
        self._reasons = [MissReason(reply.reason or MissReason.COLD)] * len(self._destinations)
        if len(copies.block) == reply.count:  # one copy each: the usual case
            return partial(self._end, self._begin_each(copies, _NO_COPIES), _NO_COPIES)
        chosen = self._best(copies)
        rest = copies.only(~chosen)
        return partial(self._end, self._begin_each(copies.only(chosen), rest), rest)

    def _end(self, ends: Sequence[Callable[[], None]], rest: _Copies) -> list[MissReason | None]:
        for end in ends:
            end()
        while len(rest.block):
            copies = rest.only(np.array([self._reasons[b] is not None for b in rest.block.tolist()], np.bool_))
            chosen = self._best(copies)
            rest = copies.only(~chosen)
            for end in self._begin_each(copies.only(chosen), rest):
                end()
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

    def _begin_each(self, copies: _Copies, rest: _Copies) -> list[Callable[[], None]]:
        """Begin to read from each segment; what ends it. ``rest`` are further copies of the same blocks."""
        try:
            # A node that does not answer must leave time for another one.
            deadline = self._deadline.part(PATIENCE) if len(rest.block) else self._deadline
        except DeadlineError:
            return []  # each block has its reason already
        segments = set(copies.segment.tolist())
        if len(segments) == 1:
            return [self._begin_segment(segments.pop(), copies, deadline)]
        return [self._begin_segment(n, copies.only(copies.segment == n), deadline) for n in segments]

    def _begin_segment(self, number: int, copies: _Copies, deadline: Deadline) -> Callable[[], None]:
        client, blocks = self._keyspace._client, _indexes(copies.block)
        try:
            node, segment = client._nodes.find(number, client._meta.topology)
            transport = client._nodes.transport(node, deadline, Use.READ)
            batch = self._batch(segment.segment_id, copies, blocks, self._destinations.select(blocks))
            failpoint("client.read.before_copy")
            with ExitStack() as stack:
                stack.enter_context(client._nodes.reading(node, len(blocks) * batch.block_bytes))
                began_s = time.perf_counter()
                reading = begin_batch(transport, batch, segment.medium, deadline)
                until_read = stack.pop_all()
        except KvpoolError as error:
            self._fail(blocks, error)
            return _nothing

        def end() -> None:
            try:
                with until_read:
                    statuses = reading()
            except KvpoolError as error:
                self._fail(blocks, error)
                return
            client._counters.times["read"].observe(time.perf_counter() - began_s)
            failed = ReadStatus.FAILED in statuses or ReadStatus.LATE in statuses
            client._nodes.judge(node, Use.READ, deadline, failed=failed)
            way = DISK if segment.medium == DISK else transport.name
            self._take(way, segment.segment_id, copies, blocks, statuses)
            if ReadStatus.BAD in statuses:
                self._read_again(transport, segment.segment_id, copies, blocks, statuses)

        return end

    def _fail(self, blocks: Sequence[int], error: KvpoolError) -> None:
        for block in blocks:
            self._reasons[block] = miss_reason(error)

    def _read_again(
        self, transport: Transport, segment_id: bytes, copies: _Copies, blocks: Sequence[int], statuses: bytearray
    ) -> None:
        """Report the copies that are bad in memory of our own too."""
        for i in np.flatnonzero(np.frombuffer(statuses, np.uint8) == ReadStatus.BAD).tolist():
            with suppress(KvpoolError):  # the client is closing
                if self._again(transport, segment_id, copies, blocks, i) == ReadStatus.BAD:
                    self._report(segment_id, blocks[i], copies, i)

    def _again(self, transport: Transport, segment_id: bytes, copies: _Copies, blocks: Sequence[int], i: int) -> int:
        """Read a bad copy once more into memory of our own.

        The caller's may be at fault, written by another thread or given for two blocks: good copies must not be
        dropped for that.
        """
        chosen = np.arange(len(blocks)) == i
        own = Blocks(self._destinations.block_bytes, whole=np.empty(self._destinations.block_bytes, np.uint8))
        batch = self._batch(segment_id, copies.only(chosen), blocks[i : i + 1], own)
        return transport.read(batch, self._deadline)[0]

    def _batch(self, segment_id: bytes, copies: _Copies, blocks: Sequence[int], destinations: Blocks) -> ReadBatch:
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
        )

    def _take(self, way: str, segment_id: bytes, copies: _Copies, blocks: Sequence[int], statuses: bytearray) -> None:
        client = self._keyspace._client
        good = statuses.count(ReadStatus.OK)
        client._counters.loaded(way, good * self._keyspace.namespace.block_bytes)
        if good == len(self._reasons):
            self._reasons = [None] * good
            return
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
