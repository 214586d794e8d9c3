"""Writing several grants over one connection without waiting for each answer.

While the node prepares one grant and commits another, the client moves the bytes of a third: all prepares go out first,
each grant's bytes follow as its slots are known, and the commits are collected last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ClosedError, KvpoolError
from kvpool.transport.base import WriteBatch, WriteStatus
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.wire.connection import Buffers, Connection
from kvpool.transport.wire.messages import Message, PrepareReply, PrepareRequest, Statuses, unpack

Move = Callable[[WriteBatch, list[int], NDArray[np.uint32], NDArray[np.uint64]], tuple[Message, Buffers]]
"""Moves blocks (indexes) of a batch to their slots and generations, or readies them to be sent as the returned payload;
the returned message makes the node commit them."""


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

    def spread(self, blocks: list[int], committed: bytes) -> None:
        """Take the node's answer for some of the blocks."""
        answers = unpack("statuses", committed, "u1", len(blocks)).tolist()
        for block, answer in zip(blocks, answers, strict=True):
            self.statuses[block] = answer


def write_grants(
    connections: ConnectionPool, batches: Sequence[WriteBatch], move: Move, deadline: Deadline
) -> list[bytearray]:
    """Prepare, move and commit the batches; one `WriteStatus` a block. What is not known to be committed is FAILED."""
    return _write_over(connections, batches, partial(_write_all, batches, move, deadline), deadline)


def write_prepared(
    connections: ConnectionPool,
    batches: Sequence[WriteBatch],
    write: Callable[[Connection, list[Prepared]], None],
    deadline: Deadline,
) -> list[bytearray]:
    """Like `write_grants`, for a ``write`` that asks and collects in its own order once all slots are known."""

    def run(connection: Connection, statuses: list[bytearray]) -> None:
        _post_prepares(connection, batches, deadline)
        write(connection, [_prepared(connection, *both, deadline) for both in zip(batches, statuses, strict=True)])

    return _write_over(connections, batches, run, deadline)


def _write_over(
    connections: ConnectionPool,
    batches: Sequence[WriteBatch],
    run: Callable[[Connection, list[bytearray]], None],
    deadline: Deadline,
) -> list[bytearray]:
    statuses = [bytearray([WriteStatus.FAILED]) * len(batch.sources) for batch in batches]
    try:
        with connections.connection(deadline.left_s()) as connection:
            try:
                run(connection, statuses)
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
    batches: Sequence[WriteBatch],
    move: Move,
    deadline: Deadline,
    connection: Connection,
    statuses: list[bytearray],
) -> None:
    _post_prepares(connection, batches, deadline)
    moved = [
        _move_one(connection, batch, status, move, deadline) for batch, status in zip(batches, statuses, strict=True)
    ]
    for prepared in moved:
        if prepared.blocks:
            prepared.spread(prepared.blocks, connection.collect(Statuses, deadline.left_s()).statuses)


def _post_prepares(connection: Connection, batches: Sequence[WriteBatch], deadline: Deadline) -> None:
    for batch in batches:
        connection.post(PrepareRequest(batch.grant), deadline.left_s())


def _move_one(connection: Connection, batch: WriteBatch, status: bytearray, move: Move, deadline: Deadline) -> Prepared:
    """Move what the node has slots for, and ask it to commit."""
    prepared = _prepared(connection, batch, status, deadline)
    if prepared.blocks:
        message, payload = move(batch, prepared.blocks, prepared.slots, prepared.generations)
        connection.post(message, deadline.left_s(), payload)
    return prepared


def _prepared(connection: Connection, batch: WriteBatch, status: bytearray, deadline: Deadline) -> Prepared:
    """Collect the node's answer to the prepare of ``batch``; what it has no slot for is in ``status`` then."""
    reply = connection.collect(PrepareReply, deadline.left_s())
    slots = unpack("slots", reply.slots, "<u4", len(batch.sources))
    generations = unpack("generations", reply.generations, "<u8", len(batch.sources))
    for block in np.flatnonzero(slots == NO_SLOT).tolist():
        status[block] = WriteStatus.NO_SLOT
    ready = np.flatnonzero(slots != NO_SLOT)
    return Prepared(ready.tolist(), slots[ready], generations[ready], status)
