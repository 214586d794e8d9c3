"""Writing over one connection: what becomes of the connection when a write stops half way."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.core.errors import DeadlineError
from kvpool.transport.base import WriteBatch, WriteStatus
from kvpool.transport.blocks import Blocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import CommitSlotsRequest, PrepareReply, Statuses, pack
from kvpool.transport.writing import write_grants

BATCH = WriteBatch(b"grant", 1, b"s" * 16, 0, 8, 0, bytes(32), Blocks(8, whole=np.zeros(8, np.uint8)))


class Connection:
    """Answers a prepare with one slot, and a commit with success."""

    def __init__(self):
        self.is_closed = False
        self.replies = iter([PrepareReply(pack([3], "<u4"), pack([1], "<u8")), Statuses(bytes(1))])

    def post(self, request, timeout_s, payload=()):
        pass

    def collect(self, reply_type, timeout_s):
        return next(self.replies)

    def close(self):
        self.is_closed = True


@pytest.fixture
def connection():
    return Connection()


def write(connection, move):
    @contextmanager
    def lend(timeout_s):
        yield connection

    [statuses] = write_grants(SimpleNamespace(connection=lend), [BATCH], move, Deadline(60))
    return list(statuses)


def test_a_write_that_comes_to_its_end_leaves_the_connection_open(connection):
    def move(batch, blocks, slots, generations):
        return CommitSlotsRequest(batch.segment_id, batch.reservation, b"", b"", b""), ()

    assert write(connection, move) == [WriteStatus.COMMITTED]
    assert not connection.is_closed


def test_one_that_stops_after_it_has_slots_closes_it_and_so_gives_them_back(connection):
    def move(batch, blocks, slots, generations):
        raise DeadlineError("the mapping took too long")

    assert write(connection, move) == [WriteStatus.FAILED]
    assert connection.is_closed
