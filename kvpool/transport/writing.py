"""Writing several grants over one connection without waiting for each answer.

While the node prepares one grant and commits another, the client moves the bytes of a third: all prepares go out first,
each grant's bytes follow as its slots are known, and the commits are collected last.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ClosedError, KvpoolError
from kvpool.ops.failpoints import failpoint
from kvpool.transport.base import WriteBatch, WriteStatus
from kvpool.transport.blocks import FarBlocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.framed import Buffers
from kvpool.transport.wire.messages import Message, PrepareReply, PrepareRequest, Statuses, unpack

Commit = Callable[[], tuple[Message, Buffers]]
"""Waits until a batch's bytes are where they belong; the message, and payload, that makes the node commit them."""

Move = Callable[[WriteBatch, list[int], NDArray[np.uint32], NDArray[np.uint64]], Commit]
"""Moves blocks (indexes) of a batch to their slots and generations, or begins to, or readies them to be sent."""

AHEAD = 2
"""Moves of far memory that are under way while others begin: the check of one is no time lost to the rest."""

TOGETHER = 4
"""Grants of far memory that are moved and committed together: a device moves 16 MiB in less time than a processor takes
to begin that, and a commit's round trips."""

FIRST = 2
"""Grants of far memory that are moved first, as soon as the node has prepared them. No commit is posted before all
prepares, which are answered in the same order: so there are no more than `AHEAD` moves by then."""

_Drawn = Iterator[tuple[WriteBatch, bytearray]]
"""Batches as they are drawn, each with the statuses that are filled in."""

_Posted = list[tuple[WriteBatch, bytearray]]
"""Those whose prepares are posted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The blocks of one batch (indexes) that the node has slots for.

    Attributes:
        blocks: Which.
        slots: uint32 each.
        generations: uint64 each.
        statuses: Of all blocks of the batch; filled in as answers come.
    """

    blocks: list[int]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    statuses: bytearray

    def spread(self, blocks: list[int], answers: Sequence[int]) -> None:
        """Take the node's answers for some of the blocks."""
        for block, answer in zip(blocks, answers, strict=True):
            self.statuses[block] = answer


@dataclass(frozen=True, slots=True)
class _Move:
    """Blocks of some batches that were moved or are under way."""

    prepared: list[Prepared]
    commit: Commit


def write_grants(
    connections: ConnectionPool, batches: Iterable[WriteBatch], move: Move, deadline: Deadline
) -> list[bytearray]:
    """Prepare, move and commit the batches; one `WriteStatus` a block. What is not known to be committed is FAILED."""
    return _write_over(connections, batches, partial(_write_all, move, deadline), deadline)


def write_prepared(
    connections: ConnectionPool,
    batches: Iterable[WriteBatch],
    write: Callable[[Connection, list[Prepared]], None],
    deadline: Deadline,
) -> list[bytearray]:
    """Like `write_grants`, for a ``write`` that asks and collects in its own order once all slots are known."""

    def run(connection: Connection, drawn: _Drawn) -> None:
        posted = _post_prepares(connection, drawn, deadline)
        write(connection, [_prepared(connection, *both, deadline) for both in posted])

    return _write_over(connections, batches, run, deadline)


def _write_over(
    connections: ConnectionPool,
    batches: Iterable[WriteBatch],
    run: Callable[[Connection, _Drawn], None],
    deadline: Deadline,
) -> list[bytearray]:
    statuses: list[bytearray] = []

    def draw() -> _Drawn:
        for batch in batches:
            statuses.append(bytearray([WriteStatus.FAILED]) * len(batch.sources))
            yield batch, statuses[-1]

    drawn = draw()
    try:
        with connections.connection(deadline.left_s()) as connection:
            try:
                run(connection, drawn)
            except BaseException:
                # Slots prepared on it and not committed belong to it: kept open, it would keep them from everybody.
                connection.close()
                raise
    except ClosedError:
        raise
    except (KvpoolError, OSError):
        with suppress(KvpoolError):
            deque(drawn, 0)  # what was collected stands, and the rest has failed too
    return statuses


def _write_all(move: Move, deadline: Deadline, connection: Connection, drawn: _Drawn) -> None:
    moving: deque[_Move] = deque()
    posted: list[_Move] = []
    try:
        for some in _groups(connection, drawn, deadline):
            prepared = [_prepared(connection, *both, deadline) for both in some]
            if any(p.blocks for p in prepared):
                moving.append(_Move(prepared, _begin(move, [batch for batch, _ in some], prepared)))
            ahead = AHEAD if isinstance(some[0][0].sources, FarBlocks) else 0
            while len(moving) > ahead:
                posted.append(_commit(connection, moving.popleft(), deadline))
        while moving:
            posted.append(_commit(connection, moving.popleft(), deadline))
    finally:
        for left in moving:
            with suppress(KvpoolError):
                left.commit()  # its slots must not be given back while they are written
    for moved in posted:
        _spread(moved, connection.collect(Statuses, deadline.left_s()).statuses)
    failpoint("client.put.after_commit")


def _groups(connection: Connection, drawn: _Drawn, deadline: Deadline) -> Iterator[_Posted]:
    """Batches that are moved together, their prepares posted; of far memory most are when the first ones move."""
    posted, together = _post_prepares(connection, islice(drawn, FIRST + TOGETHER), deadline), 1
    if posted and isinstance(sources := posted[0][0].sources, FarBlocks):
        sources.expect_store()
        yield posted[:FIRST]
        if len(posted) > FIRST:
            yield posted[FIRST:]
        posted, together = [], TOGETHER
    posted += _post_prepares(connection, drawn, deadline)
    for first in range(0, len(posted), together):
        yield posted[first : first + together]


def _begin(move: Move, batches: Sequence[WriteBatch], prepared: Sequence[Prepared]) -> Commit:
    """Begin to move the blocks of some batches that there are slots for."""
    if len(batches) == 1:
        return move(batches[0], prepared[0].blocks, prepared[0].slots, prepared[0].generations)
    before = accumulate((len(batch.sources) for batch in batches[:-1]), initial=0)
    blocks = [first + block for first, p in zip(before, prepared, strict=True) for block in p.blocks]
    sources = [batch.sources for batch in batches if isinstance(batch.sources, FarBlocks)]
    hashes = b"".join(batch.hashes for batch in batches)
    joined = replace(batches[0], hashes=hashes, sources=sources[0].joined(sources[1:]))
    slots, generations = np.concatenate([p.slots for p in prepared]), np.concatenate([p.generations for p in prepared])
    return move(joined, blocks, slots, generations)


def _post_prepares(connection: Connection, drawn: _Drawn, deadline: Deadline) -> _Posted:
    """Each as soon as it is drawn: the node begins while the others are still being made."""
    posted: _Posted = []
    for batch, statuses in drawn:
        connection.post(PrepareRequest(batch.grant), deadline.left_s())
        posted.append((batch, statuses))
    return posted


def _prepared(connection: Connection, batch: WriteBatch, statuses: bytearray, deadline: Deadline) -> Prepared:
    """Collect the node's answer to the prepare of ``batch``; ``statuses`` tell then what it has no slot for."""
    reply = connection.collect(PrepareReply, deadline.left_s())
    failpoint("client.put.after_prepare")
    slots = unpack("slots", reply.slots, "<u4", len(batch.sources))
    generations = unpack("generations", reply.generations, "<u8", len(batch.sources))
    for block in np.flatnonzero(slots == NO_SLOT).tolist():
        statuses[block] = WriteStatus.NO_SLOT
    ready = np.flatnonzero(slots != NO_SLOT)
    return Prepared(ready.tolist(), slots[ready], generations[ready], statuses)


def _commit(connection: Connection, moved: _Move, deadline: Deadline) -> _Move:
    """Ask the node to commit a move once it has ended."""
    message, payload = moved.commit()
    failpoint("client.put.before_commit")
    connection.post(message, deadline.left_s(), payload)
    return moved


def _spread(moved: _Move, committed: bytes) -> None:
    answers = unpack("statuses", committed, "u1", sum(len(p.blocks) for p in moved.prepared)).tolist()
    for prepared in moved.prepared:
        prepared.spread(prepared.blocks, answers[: len(prepared.blocks)])
        del answers[: len(prepared.blocks)]
