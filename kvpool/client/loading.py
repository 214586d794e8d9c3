"""Loading: locate, read from each segment by its node's transport, and tell the directory of what was not there.

A long slice is loaded in steps: while the blocks of one are read, the next ones are located. Blocks in far memory are
only begun in their step, since a device moves them by itself, and ended when all steps have begun.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpool.client.far import begin_batch
from kvpool.client.locating import NO_COPIES, Copies, locate, locate_all, miss_reason
from kvpool.client.nodes import Use
from kvpool.client.results import LoadResult
from kvpool.core.directory import DISK, MissReason
from kvpool.core.errors import DeadlineError, KvpoolError
from kvpool.core.keys import hash_at, select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.ops.failpoints import failpoint
from kvpool.transport import ReadBatch, ReadStatus, Transport
from kvpool.transport.blocks import Blocks, FarBlocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import Done, NodeInfo, ReportBadRequest, SegmentInfo

if TYPE_CHECKING:
    from kvpool.client.keyspace import Keyspace

STEP_BLOCKS = 512
"""Blocks located at a time."""

FAR_STEP_BLOCKS, FAR_GROWTH, FAR_STEP_BLOCKS_MAX = 256, 4, 2048
"""For far memory: blocks located first, since its link should not wait for longer, and each step disturbs what the
device computes; how many times as many each further step has; and the most."""

PATIENCE = 0.5
"""Part of the time left that a read gets while there are other copies to turn to."""

_REASONS = {
    ReadStatus.GONE: MissReason.EVICTED,
    ReadStatus.BAD: MissReason.VERIFY_FAILED,
    ReadStatus.FAILED: MissReason.NODE_DOWN,
    ReadStatus.LATE: MissReason.OVER_DEADLINE,
    ReadStatus.REFUSED: MissReason.NODE_DOWN,
}

_Reasons = list[MissReason | None]
"""Why each block was not loaded, or None."""


def load_blocks(
    keyspace: "Keyspace",
    packed: bytes,
    destinations: Blocks,
    first: int,
    shard: int,
    deadline: Deadline,
) -> LoadResult:
    """See `Keyspace.load`; ``packed`` ends with the last block wanted."""
    far = isinstance(destinations, FarBlocks)
    steps = _steps(len(destinations), far=far)
    found = locate_all(keyspace, packed, first, steps, shard, destinations, deadline)
    begun: deque[tuple[range, _Load]] = deque()
    reasons: _Reasons = []

    def end_first() -> None:
        step, load = begun[0]
        reasons.extend(load.end())
        if load.was_refused:  # with grants that are over: another locate brings new ones
            keyspace._grants.forget()
            again = locate(keyspace, packed, first, step, shard, deadline)
            if not isinstance(again, MissReason):
                load.begin(again)
                reasons[step.start :] = load.end()
        begun.popleft()

    try:
        for step, located in zip(steps, found, strict=True):
            hashes = packed[(first + step.start) * HASH_BYTES : (first + step.stop) * HASH_BYTES]
            load = _Load(keyspace, hashes, destinations.select(step), shard, deadline)
            begun.append((step, load))
            load.begin(located)
            if not far:
                end_first()
        while begun:
            end_first()
    finally:
        for _, load in begun:
            load.wait()  # nothing may be written any more, whatever went wrong
    held = loaded = reasons.count(None)
    if held < len(reasons):
        loaded = next(i for i, reason in enumerate(reasons) if reason is not None)
        keyspace._client._counters.missed(reasons)
    return LoadResult(loaded, tuple(reasons), held * keyspace.namespace.block_bytes)


def _steps(blocks: int, *, far: bool) -> list[range]:
    """``range(blocks)`` in steps."""
    steps: list[range] = []
    start = 0
    count, growth, most = (FAR_STEP_BLOCKS, FAR_GROWTH, FAR_STEP_BLOCKS_MAX) if far else (STEP_BLOCKS, 1, STEP_BLOCKS)
    while start < blocks:
        steps.append(range(start, min(start + count, blocks)))
        start, count = start + count, min(count * growth, most)
    return steps


def _whence(node: NodeInfo, segment: SegmentInfo, transport: Transport) -> dict[str, str]:
    """Where blocks are read from, for traces."""
    return {"node": node.node_id, "tier": segment.medium, "transport": transport.name}


def _indexes(blocks: NDArray[np.uint32]) -> Sequence[int]:
    """Ascending indexes; a range where they follow one another, as they mostly do."""
    first, last = int(blocks[0]), int(blocks[-1])
    return range(first, last + 1) if last - first + 1 == len(blocks) else blocks.tolist()


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
        self._reasons: _Reasons = []
        self._rest = NO_COPIES
        self._under_way: deque[Callable[[], None]] = deque()
        self.was_refused = False

    def begin(self, located: Copies | MissReason) -> None:
        """Begin to read each block from its best copy; `end`, or `wait`, must be called."""
        if isinstance(located, MissReason):
            self._reasons, self._rest = [located] * len(self._destinations), NO_COPIES
            return
        self._reasons = [located.reason or MissReason.COLD] * len(self._destinations)
        if located.each_once:  # the usual case
            self._begin_each(located, NO_COPIES)
        else:
            self._begin_best(located)

    def end(self) -> _Reasons:
        """End that, and read what failed from the next copy."""
        self.wait()
        while len(self._rest.block):
            wanted = np.array([self._reasons[b] is not None for b in self._rest.block.tolist()], np.bool_)
            if not wanted.any():
                break
            self._begin_best(self._rest.only(wanted))
            self.wait()
        return self._reasons

    def wait(self) -> None:
        """End what is under way: nothing is written any more."""
        while self._under_way:
            self._under_way.popleft()()

    def _begin_best(self, copies: Copies) -> None:
        chosen = self._best(copies)
        self._begin_each(copies.only(chosen), copies.only(~chosen))

    def _best(self, copies: Copies) -> NDArray[np.bool_]:
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

    def _begin_each(self, copies: Copies, rest: Copies) -> None:
        """Begin to read from each segment; ``rest`` are further copies of the same blocks."""
        self._rest = rest
        try:
            # A node that does not answer must leave time for another one.
            deadline = self._deadline.part(PATIENCE) if len(rest.block) else self._deadline
        except DeadlineError:
            self._rest = NO_COPIES  # each block has its reason already
            return
        segments = set(copies.segment.tolist())
        for number in segments:
            some = copies if len(segments) == 1 else copies.only(copies.segment == number)
            self._begin_segment(number, some, deadline)

    def _begin_segment(self, number: int, copies: Copies, deadline: Deadline) -> None:
        client, blocks = self._keyspace._client, _indexes(copies.block)
        try:
            node, segment = client._nodes.find(number, client._meta.topology)
            transport = client._nodes.transport(node, deadline, Use.READ)
            batch = self._batch(node, segment.segment_id, copies, blocks, self._destinations.select(blocks))
            failpoint("client.read.before_copy")
            span = client._tracer.begin("kvpool.read", **_whence(node, segment, transport), blocks=len(blocks))
            over = client._nodes.reading(node, len(blocks) * batch.block_bytes)
            began_s = time.perf_counter()
            try:
                with span.at_hand():
                    reading = begin_batch(transport, batch, segment.medium, deadline)
            except BaseException:
                over()
                span.end()
                raise
        except KvpoolError as error:
            self._fail(blocks, error)
            return

        def end() -> None:
            try:
                with span.at_hand():
                    statuses = reading()
            except KvpoolError as error:
                self._fail(blocks, error)
                return
            finally:
                over()
                span.end()
            client._counters.times["read"].observe(time.perf_counter() - began_s)
            failed = ReadStatus.FAILED in statuses or ReadStatus.LATE in statuses
            client._nodes.judge(node, Use.READ, deadline, failed=failed)
            self._settle(node, segment, transport, copies, blocks, statuses)

        self._under_way.append(end)

    def _fail(self, blocks: Sequence[int], error: KvpoolError) -> None:
        for block in blocks:
            self._reasons[block] = miss_reason(error)

    def _settle(
        self,
        node: NodeInfo,
        segment: SegmentInfo,
        transport: Transport,
        copies: Copies,
        blocks: Sequence[int],
        statuses: bytearray,
    ) -> None:
        """Take what was read, and report the copies that are bad in memory of our own too."""
        self.was_refused |= ReadStatus.REFUSED in statuses
        way = DISK if segment.medium == DISK else transport.name
        verified, bad = statuses.count(ReadStatus.OK), statuses.count(ReadStatus.BAD)
        with self._keyspace.tracer.span("kvpool.verify", verified_blocks=verified, bad_blocks=bad):
            self._take(way, segment.segment_id, copies, blocks, statuses)
            for i in np.flatnonzero(np.frombuffer(statuses, np.uint8) == ReadStatus.BAD).tolist() if bad else ():
                with suppress(KvpoolError):  # the client is closing
                    if self._again(transport, node, segment.segment_id, copies, blocks, i) == ReadStatus.BAD:
                        self._report(segment.segment_id, blocks[i], copies, i)

    def _again(
        self, transport: Transport, node: NodeInfo, segment_id: bytes, copies: Copies, blocks: Sequence[int], i: int
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
        self, node: NodeInfo, segment_id: bytes, copies: Copies, blocks: Sequence[int], destinations: Blocks
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

    def _take(self, way: str, segment_id: bytes, copies: Copies, blocks: Sequence[int], statuses: bytearray) -> None:
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

    def _report(self, segment_id: bytes, block: int, copies: Copies, i: int) -> None:
        block_hash, place = hash_at(self._hashes, block), (int(copies.slot[i]), int(copies.generation[i]))
        request = ReportBadRequest(self._keyspace.namespace.id, block_hash, segment_id, *place)
        with suppress(KvpoolError):  # whoever meets the block next reports it
            self._keyspace._client._meta.call(request, Done, self._deadline, again=False)
