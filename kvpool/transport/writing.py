"""Writing several grants over one connection without waiting for each answer.

While the node prepares one grant and commits another, the client moves the bytes of a third: all prepares go out first,
each grant's bytes follow as its slots are known, and the commits are collected last.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ClosedError, KvpoolError
from kvpool.transport.base import WriteBatch, WriteStatus
from kvpool.transport.blocks import FarBlocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.pool import ConnectionPool
from kvpool.transport.wire.connection import Buffers, Connection
from kvpool.transport.wire.messages import Message, PrepareReply, PrepareRequest, Statuses, unpack

Commit = Callable[[], tuple[Message, Buffers]]
"""Waits until a batch's bytes are where they belong; the message, and payload, that makes the node commit them."""

Move = Callable[[WriteBatch, list[int], NDArray[np.uint32], NDArray[np.uint64]], Commit]
"""Moves blocks (indexes) of a batch to their slots and generations, or begins to, or readies them to be sent."""

AHEAD = 2
"""Moves of far memory that are under way while the next begins: the check of one is no time lost to the others."""


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
    moved: list[list[int]] = []
    moving: deque[Commit] = deque()
    try:
        for batch in batches:
            blocks, commit = _begin_move(connection, batch, move, deadline)
            moved.append(blocks)
            if commit is not None:
                moving.append(commit)
            while len(moving) > (AHEAD if isinstance(batch.sources, FarBlocks) else 0):
                _commit(connection, moving, deadline)
        while moving:
            _commit(connection, moving, deadline)
    finally:
        for commit in moving:
            with suppress(KvpoolError):
                commit()  # its slots must not be given back while they are written
    for status, blocks in zip(statuses, moved, strict=True):
        committed = connection.collect(Statuses, deadline.left_s()).statuses if blocks else b""
        _spread(status, blocks, committed)


def _begin_move(
    connection: Connection, batch: WriteBatch, move: Move, deadline: Deadline
) -> tuple[list[int], Commit | None]:
    """Begin to move what the node has slots for; the blocks moved, and what commits them."""
    prepared = connection.collect(PrepareReply, deadline.left_s())
    slots = unpack("slots", prepared.slots, "<u4", len(batch.sources))
    generations = unpack("generations", prepared.generations, "<u8", len(batch.sources))
    ready = np.flatnonzero(slots != NO_SLOT)
    blocks = ready.tolist()
    return blocks, move(batch, blocks, slots[ready], generations[ready]) if blocks else None


def _commit(connection: Connection, moving: deque[Commit], deadline: Deadline) -> None:
    """Ask the node to commit the move that began first."""
    message, payload = moving.popleft()()
    connection.post(message, deadline.left_s(), payload)


def _spread(status: bytearray, blocks: list[int], committed: bytes) -> None:
    answers = unpack("statuses", committed, "u1", len(blocks)).tolist()
    status[:] = bytes([WriteStatus.NO_SLOT]) * len(status)
    for block, answer in zip(blocks, answers, strict=True):
        status[block] = answer
