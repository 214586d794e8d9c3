"""Writing several grants over one connection without waiting for each answer.

While the node prepares one grant and commits another, the client moves the bytes of a third: all prepares go out first,
each grant's bytes follow as its slots are known, and the commits are collected last.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

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
from kvpool.transport.wire.messages import CommitSlotsRequest, Message, PrepareReply, PrepareRequest, Statuses, unpack

Commit = Callable[[], tuple[Message, Buffers]]
"""Waits until a batch's bytes are where they belong; the message, and payload, that makes the node commit them."""

Move = Callable[[WriteBatch, list[int], NDArray[np.uint32], NDArray[np.uint64]], Commit]
"""Moves blocks (indexes) of a batch to their slots and generations, or begins to, or readies them to be sent."""

AHEAD = 4
"""Moves of far memory that are under way while others begin: the check of one is no time lost to the rest."""

TOGETHER = 4
"""Moves of far memory in one commit: a device moves 16 MiB in less time than a commit's round trips take. At the end
each commit has half of the moves that are left, since the last one is waited for."""

_Drawn = Iterator[tuple[WriteBatch, bytearray]]
"""Batches as they are drawn, each with the statuses that are filled in."""


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
    """Blocks that were moved or are under way."""

    prepared: Prepared
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
        deque(drawn, 0)  # what was collected stands, and the rest has failed too
    return statuses


def _write_all(move: Move, deadline: Deadline, connection: Connection, drawn: _Drawn) -> None:
    moving: deque[_Move] = deque()
    posted: list[list[_Move]] = []
    all_posted = _post_prepares(connection, drawn, deadline)
    if all_posted and isinstance(all_posted[0][0].sources, FarBlocks):
        all_posted[0][0].sources.expect_store()
    try:
        for batch, status in all_posted:
            prepared = _prepared(connection, batch, status, deadline)
            if prepared.blocks:
                commit = move(batch, prepared.blocks, prepared.slots, prepared.generations)
                moving.append(_Move(prepared, commit))
            ahead, together = (AHEAD, TOGETHER) if isinstance(batch.sources, FarBlocks) else (0, 1)
            while len(moving) >= ahead + together:
                posted.append(_commit(connection, moving, together, deadline))
        while moving:
            posted.append(_commit(connection, moving, max(1, len(moving) // 2), deadline))
    finally:
        for left in moving:
            with suppress(KvpoolError):
                left.commit()  # its slots must not be given back while they are written
    for some in posted:
        _spread(some, connection.collect(Statuses, deadline.left_s()).statuses)
    failpoint("client.put.after_commit")


def _post_prepares(connection: Connection, drawn: _Drawn, deadline: Deadline) -> list[tuple[WriteBatch, bytearray]]:
    """Each as soon as it is drawn: the node begins while the others are still being made."""
    posted: list[tuple[WriteBatch, bytearray]] = []
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


def _commit(connection: Connection, moving: deque[_Move], together: int, deadline: Deadline) -> list[_Move]:
    """Ask the node to commit the moves that began first, up to so many that fit in one message."""
    some, messages = [moving[0]], [moving[0].commit()]
    moving.popleft()
    while moving and len(some) < together and isinstance(messages[0][0], CommitSlotsRequest):
        messages.append(moving[0].commit())
        some.append(moving.popleft())
    message, payload = messages[0]
    if len(messages) > 1:
        message = _joined([m for m, _ in messages if isinstance(m, CommitSlotsRequest)])
    failpoint("client.put.before_commit")
    connection.post(message, deadline.left_s(), payload)
    return some


def _joined(messages: Sequence[CommitSlotsRequest]) -> CommitSlotsRequest:
    """One message for several grants of a reservation on one segment."""
    return CommitSlotsRequest(
        messages[0].segment_id,
        messages[0].reservation,
        b"".join(message.slots for message in messages),
        b"".join(message.generations for message in messages),
        b"".join(message.checksums for message in messages),
    )


def _spread(moves: Sequence[_Move], committed: bytes) -> None:
    answers = unpack("statuses", committed, "u1", sum(len(move.prepared.blocks) for move in moves)).tolist()
    for move in moves:
        blocks = move.prepared.blocks
        move.prepared.spread(blocks, answers[: len(blocks)])
        del answers[: len(blocks)]
