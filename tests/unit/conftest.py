"""Parts that several files test: a directory over fake segments, a store over real shared memory."""

import pytest
from fake_node import SmallPool
from real_store import WRITER, Node

from kvpool.testing import ManualClock


@pytest.fixture
def pool():
    """Two segments of ten pages; nothing has to go."""
    return SmallPool(10, 10)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def node(tmp_path, clock):
    node = Node(tmp_path, clock)
    yield node
    node.close()


@pytest.fixture
def store(node):
    return node.store


@pytest.fixture
def prepared(node, store):
    """(reservation, slots, generations) of one block."""
    reservation, grant = node.reserve()
    return reservation, *store.prepare(grant, WRITER)
