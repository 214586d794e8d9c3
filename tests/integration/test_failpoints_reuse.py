"""Memory that is used again, or written, while a reader is in the middle of it: the old bytes or a miss, never others.

Rows 1, 2 and 9 of the fault matrix, with a reader or writer that waits at a failpoint for as long as it takes.
"""

import pytest

import kvpool
from tests.integration.conftest import random_chain
from tests.integration.faulting import BLOCKS, FaultPool
from tests.waiting import eventually

READER_S = 30.0
"""The reader must outlast what others do meanwhile."""


@pytest.fixture
def pool(fault_pool):
    return fault_pool


def overwrite(pool: FaultPool, chain: list[bytes]) -> None:
    """Evict a chain, and put other blocks into all memory there is; then the chain again, with other bytes."""
    pool.fill()
    assert not pool.has(chain)
    pool.put_again(chain)
    pool.fill()


@pytest.mark.parametrize(
    ("point", "transport", "pieces"),
    [
        ("client.read.before_copy", "shm", 1),
        ("client.read.before_copy", "tcp", 1),
        ("client.copy.mid_block", "shm", 2),
        ("client.read.before_verify", "shm", 1),
        ("client.read.before_verify", "tcp", 1),
    ],
)
def test_a_reader_whose_memory_is_used_again_gets_the_old_bytes_or_a_miss(pool, point, transport, pieces):
    chain = pool.put_on("n0", 3)  # one read: what comes from a second node would be read after the pause
    with pool.actor(transport) as reader:
        reader.points.arm(point, "pause")
        reader.begin("get", chain=chain, timeout_s=READER_S, pieces=pieces)
        reader.points.wait_until_hit(point)

        overwrite(pool, chain)
        reader.points.release(point)
        loaded = reader.result(pool.history)

    assert loaded.loaded == (3 if point == "client.read.before_verify" else 0), "what had been copied was whole"
    pool.settle()


def test_a_slot_that_is_being_sent_is_not_given_out(pool):
    chain = pool.put_on("n0", 3)
    points = pool.points("n0")
    with pool.actor("tcp") as reader:
        points.arm("node.get.after_pin", "pause")
        reader.begin("get", chain=chain, timeout_s=READER_S)
        points.wait_until_hit("node.get.after_pin")

        for _ in range(4):
            pool.put(random_chain(BLOCKS // 2))
        assert not pool.has(chain)
        points.release("node.get.after_pin")
        loaded = reader.result(pool.history)

    assert loaded.loaded == 3, "freed, and still in place until they have left"
    pool.settle()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_reader_in_the_middle_of_a_writer_refuses_what_it_got(pool, transport):
    """The writer has half of each block in the slots that the reader was told of."""
    chain = random_chain(3)
    pool.put_again(chain)
    with pool.actor(transport) as reader, pool.actor("shm", "writer") as writer:
        reader.points.arm("client.read.before_copy", "pause")
        reader.begin("get", chain=chain, timeout_s=READER_S)
        reader.points.wait_until_hit("client.read.before_copy")

        pool.fill()
        writer.points.arm("client.copy.mid_block", "pause")
        writer.begin("put", chain=random_chain(BLOCKS), attempt=pool.attempt(), timeout_s=READER_S, pieces=2)
        writer.points.wait_until_hit("client.copy.mid_block")
        reader.points.release("client.read.before_copy")
        assert reader.result(pool.history).loaded == 0
        writer.points.release("client.copy.mid_block")
        writer.result(pool.history)

    pool.settle()


def test_of_two_who_write_the_same_block_the_first_wins_and_the_other_is_told(pool):
    chain, point = random_chain(3), "client.put.before_commit"
    with pool.actor("shm") as first, pool.actor("shm", "second") as second:
        first.points.arm(point, "pause")
        first.begin("put", chain=chain, attempt=pool.attempt(), timeout_s=READER_S)
        first.points.wait_until_hit(point)
        eventually(lambda: not pool.client.status().counters["reservations"])

        # Its time has run out: others may write, and what it commits after them counts for nothing.
        second.begin("put", chain=chain, attempt=pool.attempt(), timeout_s=READER_S)
        assert second.result(pool.history).stored
        pool.put_again(chain)  # in a full pool one may find no room beside what the first still holds
        first.points.release(point)
        late = first.result(pool.history)

    assert (late.stored, late.refused) == (0, 3)
    assert pool.put(chain) == kvpool.StoreResult(0, existing=3, in_flight=0, refused=0, missing_from=None, size_bytes=0)
    assert pool.has(chain)
    pool.settle()
