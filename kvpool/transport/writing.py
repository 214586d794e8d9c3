"""Writing several grants over one connection without waiting for each answer.

While the node prepares one grant and commits another, the client moves the bytes of a third: all prepares go out first,
each grant's bytes follow as its slots are known, and the commits are collected last.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ClosedError, KvpoolError
from kvpool.ops.failpoints import failpoint
from kvpool.transport.base import WriteBatch, WriteStatus
from kvpool.transport.blocks import FarBlocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.wire.connection import Buffers, Connection
from kvpool.transport.wire.messages import CommitSlotsRequest, Message, PrepareReply, PrepareRequest, Statuses, unpack

Commit = Callable[[], tuple[Message, Buffers]]
"""Waits until a batch's bytes are where they belong; the message, and payload, that makes the node commit them."""

Move = Callable[[WriteBatch, list[int], NDArray[np.uint32], NDArray[np.uint64]], Commit]
"""Moves blocks (indexes) of a batch to their slots and generations, or begins to, or readies them to be sent."""

AHEAD = 4
"""Moves of far memory that are under way while others begin: the check of one is no time lost to the rest."""

TOGETHER = 4
"""Moves of far memory in one commit: a device moves 16 MiB in less time than a commit's round trips take."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Blocks (indexes) of a batch that were moved or are under way, and where their statuses go."""

    status: bytearray
    blocks: list[int]
    commit: Commit


def write_grants(
    connections: ConnectionPool, batches: Sequence[WriteBatch], move: Move, deadline: Deadline
) -> list[bytearray]:
    """Prepare, move and commit the batches; one `WriteStatus` a block. What is not known to be committed is FAILED."""
    statuses = [bytearray([WriteStatus.FAILED]) * len(batch.sources) for batch in batches]
    try:
        with connections.connection(deadline.left_s()) as connection:
            try:
                _write_all(connection, batches, statuses, move, deadline)
            except BaseException:
                # Slots prepared on it and not committed belong to it: kept open, it would keep them from everybody.
                connection.close()
                raise
    except ClosedError:
        raise
    except (KvpoolError, OSError):
        pass  # what was collected stands
    return statuses


def _write_all(
    connection: Connection, batches: Sequence[WriteBatch], statuses: list[bytearray], move: Move, deadline: Deadline
) -> None:
    for batch in batches:
        connection.post(PrepareRequest(batch.grant), deadline.left_s())
    moved: list[_Move] = []
    moving: deque[_Move] = deque()
    posted: list[list[_Move]] = []
    try:
        for batch, status in zip(batches, statuses, strict=True):
            moved.append(_begin_move(connection, batch, status, move, deadline))
            moving.extend(m for m in moved[-1:] if m.blocks)
            ahead, together = (AHEAD, TOGETHER) if isinstance(batch.sources, FarBlocks) else (0, 1)
            while len(moving) >= ahead + together:
                posted.append(_commit(connection, moving, together, deadline))
        while moving:
            posted.append(_commit(connection, moving, TOGETHER, deadline))
    finally:
        for left in moving:
            with suppress(KvpoolError):
                left.commit()  # its slots must not be given back while they are written
    for one in moved:
        one.status[:] = bytes([WriteStatus.NO_SLOT]) * len(one.status)
        for block in one.blocks:
            one.status[block] = WriteStatus.FAILED  # until the node has answered
    for some in posted:
        _spread(some, connection.collect(Statuses, deadline.left_s()).statuses)
    failpoint("client.put.after_commit")


def _begin_move(connection: Connection, batch: WriteBatch, status: bytearray, move: Move, deadline: Deadline) -> _Move:
    """Begin to move what the node has slots for."""
    prepared = connection.collect(PrepareReply, deadline.left_s())
    failpoint("client.put.after_prepare")
    slots = unpack("slots", prepared.slots, "<u4", len(batch.sources))
    generations = unpack("generations", prepared.generations, "<u8", len(batch.sources))
    ready = np.flatnonzero(slots != NO_SLOT)
    blocks = ready.tolist()
    return _Move(status, blocks, move(batch, blocks, slots[ready], generations[ready]) if blocks else _nothing)


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
    answers = iter(unpack("statuses", committed, "u1", sum(len(move.blocks) for move in moves)).tolist())
    for move in moves:
        for block in move.blocks:
            move.status[block] = next(answers)


def _nothing() -> tuple[Message, Buffers]:
    raise AssertionError("no block was moved")
