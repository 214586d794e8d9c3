"""Writing over one connection: what becomes of the connection when a write stops half way."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.core.errors import DeadlineError
from kvpool.transport.base import WriteBatch, WriteStatus
from kvpool.transport.blocks import Blocks, FarBlocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import CommitSlotsRequest, PrepareReply, Statuses, pack
from kvpool.transport.writing import write_grants

BATCH = WriteBatch(b"grant", 1, b"s" * 16, 0, 8, 0, bytes(32), Blocks(8, whole=np.zeros(8, np.uint8)))


class Connection:
    """Answers a prepare with one slot, and a commit with success; ``told`` is what came when."""

    def __init__(self):
        self.is_closed = False
        self.told = []
        self.commits = []

    def post(self, request, timeout_s, payload=()):
        self.told.append(type(request).__name__)
        if isinstance(request, CommitSlotsRequest):
            self.commits.append(request)

    def collect(self, reply_type, timeout_s):
        if reply_type is PrepareReply:
            return PrepareReply(pack([3], "<u4"), pack([1], "<u8"))
        return Statuses(bytes(max(1, len(self.commits.pop(0).slots) // 4)))

    def close(self):
        self.is_closed = True
        self.told.append("close")


@pytest.fixture
def connection():
    return Connection()


class Far(FarBlocks):
    """A block that is moved in the background."""

    def __len__(self):
        return 1

    def select(self, blocks):
        return self

    def begin_load(self, memory, starts, seeds, *, lasting):
        raise NotImplementedError

    def begin_store(self, memory, starts, seeds, *, lasting):
        raise NotImplementedError


def write(connection, move, batches=(BATCH,)):
    @contextmanager
    def lend(timeout_s):
        yield connection

    return [status for [status] in write_grants(SimpleNamespace(connection=lend), batches, move, Deadline(60))]


def test_a_write_that_comes_to_its_end_leaves_the_connection_open(connection):
    def move(batch, blocks, slots, generations):
        return lambda: (CommitSlotsRequest(batch.segment_id, batch.reservation, b"", b"", b""), ())

    assert write(connection, move) == [WriteStatus.COMMITTED]
    assert not connection.is_closed


def test_one_that_stops_after_it_has_slots_closes_it_and_so_gives_them_back(connection):
    def move(batch, blocks, slots, generations):
        raise DeadlineError("the mapping took too long")

    assert write(connection, move) == [WriteStatus.FAILED]
    assert connection.is_closed


def test_moves_in_the_background_overlap_and_are_committed_in_order(connection):
    """The next one begins before the last has ended, and no commit is left out."""
    batches = [replace(BATCH, sources=Far(8), shard=i) for i in range(11)]

    def move(batch, blocks, slots, generations):
        connection.told.append(f"begin {batch.shard}")

        def commit():
            connection.told.append(f"end {batch.shard}")
            where = (slots.tobytes(), generations.tobytes(), bytes([batch.shard] * 8))
            return CommitSlotsRequest(batch.segment_id, batch.reservation, *where), ()

        return commit

    assert write(connection, move, batches) == [WriteStatus.COMMITTED] * len(batches)
    moves = [told for told in connection.told if told.startswith(("begin", "end"))]
    assert [told for told in moves if told.startswith("end")] == [f"end {i}" for i in range(11)]
    assert moves.index("begin 1") < moves.index("end 0")
    assert connection.told.count("CommitSlotsRequest") == 5, "four moves, then half of the rest each time"


def test_slots_are_not_given_back_while_they_are_written(connection):
    """A later move fails: the connection closes only when those in the background have ended."""
    batches = [replace(BATCH, sources=Far(8), reservation=i) for i in range(2)]

    def move(batch, blocks, slots, generations):
        if batch.reservation == 1:
            raise DeadlineError("the mapping took too long")

        def commit():
            connection.told.append("end")
            raise DeadlineError("so it had begun")

        return commit

    assert write(connection, move, batches) == [WriteStatus.FAILED] * 2
    assert connection.told[-2:] == ["end", "close"]
