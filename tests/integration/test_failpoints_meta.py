"""A metadata service that dies, stops or runs out of memory at each step: nodes and clients find the truth again."""

import signal

import pytest

from tests.integration.conftest import random_chain
from tests.integration.faulting import TIMEOUT_S, FaultPool, rejoin
from tests.waiting import eventually, is_frozen

PUTS = [
    "meta.reserve.before_place",
    "meta.reserve.before_answer",
    "meta.commit.before_take",
    "meta.commit.before_answer",
]
OTHERS = [
    "meta.match.before_answer",
    "meta.locate.before_answer",
    "meta.abort.before_answer",
    "meta.inventory.before_take",
    "meta.inventory.after_take",
    "meta.ready.before_admit",
    "meta.tick.begin",
]


@pytest.fixture
def pool(fault_pool):
    return fault_pool


def meet(pool: FaultPool, point: str, action: str) -> list[bytes]:
    """Let the service reach ``point``; a chain that somebody was busy with then."""
    points, chain = pool.points("meta"), random_chain(3)
    if point in PUTS:
        points.arm(point, action)
        pool.put(chain)
    elif point == "meta.abort.before_answer":
        reservation = pool.keyspace.reserve(chain)
        points.arm(point, action)
        pool.keyspace.abort(reservation, timeout_s=TIMEOUT_S)
    else:
        pool.put_again(chain)
        points.arm(point, action)
        if point == "meta.match.before_answer":
            pool.keyspace.match(chain, lease_s=60, timeout_s=TIMEOUT_S)
        elif point == "meta.locate.before_answer":
            pool.get(chain)
        elif point != "meta.tick.begin":
            rejoin(pool, "n0")
    points.wait_until_hit(point)
    return chain


@pytest.mark.parametrize("point", PUTS + OTHERS)
def test_a_killed_service_is_rebuilt_from_its_nodes(pool, point):
    chain = meet(pool, point, "kill")
    assert pool.meta.wait() == -signal.SIGKILL
    pool.get(chain)

    pool.stop(pool.meta)
    pool.start_meta()

    pool.get(chain)
    pool.put_again(chain)
    pool.settle()


@pytest.mark.parametrize("point", PUTS + OTHERS)
def test_a_service_that_stops_past_all_deadlines_goes_on(pool, point):
    chain = meet(pool, point, "stop")
    pid = pool.meta.pid
    eventually(lambda: is_frozen(pid))
    try:
        pool.get(chain)  # each ends by its deadline, and all together they outlast every lease and reservation
        pool.get(chain)
    finally:
        pool.signal(pool.meta, signal.SIGCONT)

    pool.get(chain)
    pool.put_again(chain)
    pool.settle()


@pytest.mark.parametrize("point", PUTS + OTHERS)
def test_a_service_without_memory_for_a_step_refuses_and_goes_on(pool, point):
    chain = meet(pool, point, "raise:MemoryError")

    pool.put_again(chain)
    pool.settle()
