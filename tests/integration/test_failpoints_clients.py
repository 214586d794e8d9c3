"""Clients that die or stop at each step of a read or a write: nothing of theirs is left, and nobody else is harmed."""

import signal

import pytest

from tests.integration.actors import Actor, doubtful
from tests.integration.conftest import random_chain
from tests.integration.faulting import TIMEOUT_S, FaultPool
from tests.waiting import eventually

GET_SCENARIOS = [
    ("client.match.after_answer", "match", "shm", 1),
    ("client.read.before_copy", "get", "shm", 1),
    ("client.read.before_copy", "get", "tcp", 1),
    ("client.read.before_verify", "get", "shm", 1),
    ("client.read.before_verify", "get", "tcp", 1),
    ("client.copy.mid_block", "get", "shm", 2),
]
PUT_SCENARIOS = [
    ("client.put.after_reserve", "put", "shm", 1),
    ("client.put.after_prepare", "put", "shm", 1),
    ("client.put.after_prepare", "put", "tcp", 1),
    ("client.copy.mid_block", "put", "shm", 2),
    ("client.put.before_commit", "put", "shm", 1),
    ("client.put.before_commit", "put", "tcp", 1),
    ("wire.send.mid_payload", "put", "tcp", 1024),
    ("client.put.after_commit", "put", "shm", 1),
]


@pytest.fixture
def pool(fault_pool):
    return fault_pool


def begin(pool: FaultPool, actor: Actor, point: str, action: str, deed: str, pieces: int) -> tuple[list[bytes], int]:
    """Let a client do something, which it meets ``point`` at; the chain that it is about, and the number of its put."""
    attempt = pool.attempt()
    chain = random_chain(3)
    arguments: dict[str, object] = {"pieces": pieces}
    if deed == "put":
        arguments["attempt"] = attempt
    else:
        pool.put_again(chain)
    if deed == "match":
        arguments = {}
    actor.points.arm(point, action)
    actor.begin(deed, chain=chain, timeout_s=TIMEOUT_S, **arguments)
    actor.points.wait_until_hit(point)
    return chain, attempt


@pytest.mark.parametrize(("point", "deed", "transport", "pieces"), GET_SCENARIOS + PUT_SCENARIOS)
def test_a_killed_client_leaves_nothing(pool, point, deed, transport, pieces):
    with pool.actor(transport) as actor:
        chain, attempt = begin(pool, actor, point, "kill", deed, pieces)
        eventually(actor.is_dead)
    if deed == "put":
        for record in doubtful(chain, attempt, 0.0):
            pool.history.add(record)

    pool.put_again(chain)
    pool.settle()


@pytest.mark.parametrize(("point", "deed", "transport", "pieces"), GET_SCENARIOS + PUT_SCENARIOS)
def test_a_client_that_stops_past_its_deadlines_gets_a_miss_or_the_right_bytes(pool, point, deed, transport, pieces):
    with pool.actor(transport) as actor:
        chain, _ = begin(pool, actor, point, "stop", deed, pieces)
        actor.wait_until_frozen()
        eventually(lambda: nobody_waits_for_it(pool))
        pool.put_again(chain)
        pool.churn()

        actor.signal(signal.SIGCONT)
        actor.result(pool.history)
        actor.begin("get", chain=chain, timeout_s=TIMEOUT_S)
        actor.result(pool.history)

        pool.put_again(chain)
        pool.settle()


def nobody_waits_for_it(pool: FaultPool) -> bool:
    counters = pool.client.status().counters
    return not counters["reservations"] and not counters["leases"]
