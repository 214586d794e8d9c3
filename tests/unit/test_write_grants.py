"""Writing over one connection: what becomes of the connection when a write stops half way."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import DeadlineError, UnavailableError
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
    """Blocks that are moved in the background."""

    def __init__(self, ids):
        super().__init__(8)
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def select(self, blocks):
        return Far([self.ids[block] for block in blocks])

    def joined(self, others):
        return Far([i for blocks in (self, *others) for i in blocks.ids])

    def begin_load(self, memory, starts, seeds, *, lasting):
        raise NotImplementedError

    def begin_store(self, memory, starts, seeds, *, lasting):
        raise NotImplementedError


def write(connection, move, batches=(BATCH,)):
    return [status for [status] in write_all(connection, move, batches)]


def write_all(connection, move, batches):
    @contextmanager
    def lend(timeout_s):
        yield connection

    return write_grants(SimpleNamespace(connection=lend), batches, move, Deadline(60))


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
    """The next one begins before the last has ended, some grants are moved together, and no commit is left out."""
    batches = [replace(BATCH, sources=Far([i]), hashes=bytes([i]) * 32) for i in range(11)]

    def move(batch, blocks, slots, generations):
        moved = batch.sources.select(blocks).ids
        assert batch.hashes == b"".join(bytes([i]) * 32 for i in moved)
        assert len(moved) == len(slots) == len(generations)
        connection.told.append(("begin", *moved))

        def commit():
            connection.told.append(("end", *moved))
            return CommitSlotsRequest(batch.segment_id, batch.reservation, slots.tobytes(), b"", b""), ()

        return commit

    assert write(connection, move, batches) == [WriteStatus.COMMITTED] * len(batches)
    moves = [told for told in connection.told if isinstance(told, tuple)]
    groups = [(0, 1), (2, 3, 4, 5), (6, 7, 8, 9), (10,)]
    assert [told for told in moves if told[0] == "end"] == [("end", *group) for group in groups]
    assert moves.index(("begin", 2, 3, 4, 5)) < moves.index(("end", 0, 1))
    assert connection.told[:7] == ["PrepareRequest"] * 6 + [("begin", 0, 1)], "the others are prepared meanwhile"
    assert connection.told.count("CommitSlotsRequest") == len(groups)


def test_blocks_without_a_slot_are_left_out_of_what_is_moved_together(connection, monkeypatch):
    batches = [replace(BATCH, sources=Far([i, 10 + i]), hashes=bytes(64)) for i in range(3)]
    answers = iter([[3, 4], [5, NO_SLOT], [NO_SLOT, 6]])
    collect = connection.collect

    def prepared(reply_type, timeout_s):
        if reply_type is not PrepareReply:
            return collect(reply_type, timeout_s)
        return PrepareReply(pack(next(answers), "<u4"), pack([1, 1], "<u8"))

    monkeypatch.setattr(connection, "collect", prepared)
    moved = []

    def move(batch, blocks, slots, generations):
        moved.append((batch.sources.select(blocks).ids, slots.tolist()))
        return lambda: (CommitSlotsRequest(batch.segment_id, batch.reservation, slots.tobytes(), b"", b""), ())

    statuses = write_all(connection, move, batches)

    assert moved == [([0, 10, 1], [3, 4, 5]), ([12], [6])]
    assert statuses == [bytearray(2), bytearray([0, WriteStatus.NO_SLOT]), bytearray([WriteStatus.NO_SLOT, 0])]


def test_slots_are_not_given_back_while_they_are_written(connection):
    """A later move fails: the connection closes only when those in the background have ended."""
    batches = [replace(BATCH, sources=Far([i])) for i in range(3)]

    def move(batch, blocks, slots, generations):
        if batch.sources.ids == [2]:
            raise DeadlineError("the mapping took too long")

        def commit():
            connection.told.append("end")
            raise DeadlineError("so it had begun")

        return commit

    assert write(connection, move, batches) == [WriteStatus.FAILED] * 3
    assert connection.told[-2:] == ["end", "close"]


def test_when_a_batch_cannot_be_made_those_after_it_have_failed_too(connection):
    def made():
        yield BATCH
        raise UnavailableError("the device refuses")

    assert write(connection, None, made()) == [WriteStatus.FAILED]
    assert connection.is_closed
