"""Writing several grants over one connection without waiting for each answer.

While the node prepares one grant and commits another, the client moves the bytes of a third: all prepares go out first,
each grant's bytes follow as its slots are known, and the commits are collected last.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ClosedError, KvpoolError
from kvpool.ops.failpoints import failpoint
from kvpool.transport.base import WriteBatch, WriteStatus
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.wire.connection import Buffers, Connection
from kvpool.transport.wire.messages import Message, PrepareReply, PrepareRequest, Statuses, unpack

Move = Callable[[WriteBatch, list[int], NDArray[np.uint32], NDArray[np.uint64]], tuple[Message, Buffers]]
"""Moves blocks (indexes) of a batch to their slots and generations, or readies them to be sent as the returned payload;
the returned message makes the node commit them."""


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
    moved = [_move_one(connection, batch, move, deadline) for batch in batches]
    for status, blocks in zip(statuses, moved, strict=True):
        committed = connection.collect(Statuses, deadline.left_s()).statuses if blocks else b""
        _spread(status, blocks, committed)
    failpoint("client.put.after_commit")


def _move_one(connection: Connection, batch: WriteBatch, move: Move, deadline: Deadline) -> list[int]:
    """Move what the node has slots for, and ask it to commit; the blocks moved."""
    prepared = connection.collect(PrepareReply, deadline.left_s())
    failpoint("client.put.after_prepare")
    slots = unpack("slots", prepared.slots, "<u4", len(batch.sources))
    generations = unpack("generations", prepared.generations, "<u8", len(batch.sources))
    ready = np.flatnonzero(slots != NO_SLOT)
    blocks = ready.tolist()
    if blocks:
        message, payload = move(batch, blocks, slots[ready], generations[ready])
        failpoint("client.put.before_commit")
        connection.post(message, deadline.left_s(), payload)
    return blocks


def _spread(status: bytearray, blocks: list[int], committed: bytes) -> None:
    answers = unpack("statuses", committed, "u1", len(blocks)).tolist()
    status[:] = bytes([WriteStatus.NO_SLOT]) * len(status)
    for block, answer in zip(blocks, answers, strict=True):
        status[block] = answer
