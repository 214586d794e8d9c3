"""Store nodes that die, stop or run out of memory at each step: whole blocks or none, and all memory comes back."""

import signal

import pytest

from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import PrepareReply, PrepareRequest
from tests.integration.conftest import random_chain
from tests.integration.faulting import FaultPool, give_up_a_block, rejoin
from tests.waiting import eventually, is_frozen

PUTS = [
    "node.put.before_prepare",
    "node.put.before_describe",
    "node.put.after_prepare",
    "node.put.mid_bytes",
    "node.put.before_header",
    "node.put.mid_header",
    "node.put.after_header",
    "node.put.after_report",
]
GETS = ["node.get.after_pin", "node.get.before_unpin"]
OTHERS = [
    "node.owner.after_drop",
    "node.orders.before_apply",
    "node.orders.after_apply",
    "node.inventory.before_scan",
    "node.inventory.mid_parts",
]
NODE = "n0"
"""The node at fault; what the other one holds is served all the time."""


@pytest.fixture
def pool(fault_pool):
    return fault_pool


def meet(pool: FaultPool, point: str, action: str) -> list[bytes]:
    """Let n0 reach ``point``; a chain that somebody was busy with then."""
    points = pool.points(NODE)
    chain = pool.put_on(NODE, 3)
    points.arm(point, action)
    if point in PUTS:
        while not points.was_hit(point):
            chain = random_chain(3)
            pool.put(chain)
    elif point in GETS:
        pool.get(chain)
    elif point == "node.owner.after_drop":
        chain = abandon(pool)
    elif point.startswith("node.orders"):
        give_up_a_block(pool, chain)
    else:
        rejoin(pool, NODE)
    points.wait_until_hit(point)
    return chain


def abandon(pool: FaultPool) -> list[bytes]:
    """A writer goes that has prepared slots on n0."""
    while True:
        chain = [*pool.put_on(NODE, 1), *random_chain(1)]
        [grant] = pool.keyspace.reserve(chain, first=1).grants
        node, _ = pool.client._nodes.find(grant.segment, pool.client._meta.topology)
        writer = Connection(f"unix://{pool.directory}/{node.node_id}.sock", "writer", 5.0)
        writer.call(PrepareRequest(grant.grant), PrepareReply, 5.0)
        writer.close()
        if node.node_id == NODE:
            return chain


@pytest.mark.parametrize("point", PUTS + GETS + OTHERS)
def test_a_killed_node_has_whole_blocks_or_none(pool, point):
    kept = pool.put_on("n1", 2)

    chain = meet(pool, point, "kill")
    assert pool.nodes[NODE].wait() == -signal.SIGKILL

    eventually(lambda: pool.has(kept))
    pool.get(chain)
    pool.stop(pool.nodes[NODE])
    pool.start_node(NODE)
    pool.get(chain)
    pool.put_again(chain)
    pool.settle()


@pytest.mark.parametrize("point", PUTS + GETS + OTHERS)
def test_a_node_that_stops_until_it_is_lost_comes_back_whole(pool, point):
    kept = pool.put_on("n1", 2)
    pid = pool.nodes[NODE].pid

    chain = meet(pool, point, "stop")
    eventually(lambda: is_frozen(pid))
    try:
        eventually(lambda: pool.has(kept))
        eventually(lambda: pool.state_of(NODE) == "lost")
        pool.get(chain)
        eventually(lambda: pool.has(kept))
    finally:
        pool.signal(pool.nodes[NODE], signal.SIGCONT)

    pool.get(chain)
    pool.put_again(chain)
    pool.settle()


@pytest.mark.parametrize("point", [*PUTS, "node.get.after_pin", *OTHERS])
def test_a_node_without_memory_for_a_step_refuses_and_goes_on(pool, point):
    kept = pool.put_on("n1", 2)

    chain = meet(pool, point, "raise:MemoryError")

    eventually(lambda: pool.has(kept))
    pool.put_again(chain)
    pool.settle()
