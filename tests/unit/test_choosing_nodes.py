"""Which of several nodes with the same block a client reads from."""

import pytest

from kvpool.client.nodes import Nodes, Use
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import NodeInfo, SegmentInfo, Topology


@pytest.fixture
def nodes():
    nodes = Nodes(("shm", "tcp"), "grpc://127.0.0.1:1", "test", streams=1)
    yield nodes
    nodes.close()


def make_node(number, *endpoints):
    segment = SegmentInfo(number, bytes([number]) * 16, "shm", 1 << 20)
    return NodeInfo(f"n{number}", 100 + number, "ready", list(endpoints) or ["tcp://127.0.0.1:1"], [segment])


def best(nodes, topology):
    return min((s.number for node in topology.nodes for s in node.segments), key=lambda n: nodes.cost(n, topology))


def test_a_node_of_this_host_is_preferred(nodes, tmp_path):
    (tmp_path / "here.sock").touch()
    far, elsewhere = make_node(1, "tcp://10.0.0.1:7310"), make_node(2, f"shm://{tmp_path}/not-here.sock", "tcp://h:1")
    near = make_node(3, f"shm://{tmp_path}/here.sock", "tcp://127.0.0.1:1")
    topology = Topology(1, [far, elsewhere, near])

    nodes.reading(near, 1 << 30)
    assert best(nodes, topology) == 3


def test_the_node_with_the_fewest_bytes_under_way_is_preferred(nodes):
    busy, idle = make_node(1), make_node(2)
    topology = Topology(1, [busy, idle])

    busy_is_over, _ = nodes.reading(busy, 2), nodes.reading(idle, 1)
    assert best(nodes, topology) == 2
    busy_is_over()
    assert best(nodes, topology) == 1


def test_equals_take_turns(nodes):
    topology = Topology(1, [make_node(1), make_node(2)])

    assert {best(nodes, topology) for _ in range(100)} == {1, 2}


def test_a_node_that_failed_is_the_last_choice(nodes, tmp_path):
    (tmp_path / "here.sock").touch()
    failed, far = make_node(1, f"shm://{tmp_path}/here.sock"), make_node(2)
    topology = Topology(1, [failed, far])
    assert best(nodes, topology) == 1

    nodes.judge(failed, Use.READ, Deadline(1.0), failed=True)

    assert best(nodes, topology) == 2


def test_a_segment_of_no_node_comes_after_all_others(nodes):
    topology = Topology(1, [make_node(1)])
    nodes.judge(topology.nodes[0], Use.READ, Deadline(1.0), failed=True)

    assert nodes.cost(1, topology) < nodes.cost(99, topology)
