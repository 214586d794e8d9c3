"""A node that says nothing for a while gets no new blocks, where others can take them; it stays in the pool."""

import numpy as np
import pytest
from fake_node import chain, make_namespace

from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import QUIET, MemberSegment, MemberState
from kvpool.meta.service import MetaService
from kvpool.ops.settings import MetaSettings

NAMESPACE = make_namespace()
PAUSE_S = 1.1 * QUIET * MetaSettings().node_ttl_s


class Pool:
    """Two nodes that have joined; `places` says which of them new blocks go to."""

    def __init__(self, clock):
        self.service = MetaService(MetaSettings(), clock, np.random.default_rng(1).bytes)
        self.service.open_namespace(NAMESPACE.document)
        self.members = []
        for name in ("n0", "n1"):
            segment = MemberSegment(name.encode().ljust(16), "shm", 64 * PAGE_BYTES)
            self.members.append(self.service.join(name, 1, (), (segment,)))
            self.service.ready(self.members[-1])
        self._token = 0

    def speak(self, *numbers):
        for number in numbers:
            self.service.heard(self.members[number], 0)
        self.service.tick()

    def places(self):
        found = set()
        for _ in range(20):
            self._token += 1
            hashes = chain(self._token)[0]
            shares = self.service.reserve(NAMESPACE.id, hashes, 0, b"", "w", 0.0).result.shares
            found |= {member.node_id for member in self.members for s, _ in shares if s in member.numbers}
        return found


@pytest.fixture
def pool(clock):
    return Pool(clock)


def test_nothing_is_placed_on_a_silent_node_until_it_speaks(pool, clock):
    assert pool.places() == {"n0", "n1"}
    clock.advance(PAUSE_S)
    pool.speak(0)
    assert pool.places() == {"n0"}
    assert pool.members[1].state == MemberState.READY

    pool.speak(1)
    assert "n1" in pool.places(), "it has the most room now"


def test_when_all_are_silent_all_are_as_good_as_before(pool, clock):
    clock.advance(PAUSE_S)
    pool.speak()
    assert pool.places() == {"n0", "n1"}


def test_a_node_that_drains_gets_nothing_when_it_speaks_again(pool, clock):
    pool.service.draining(pool.members[1])
    clock.advance(PAUSE_S)
    pool.speak(0)
    pool.speak(0, 1)
    assert pool.places() == {"n0"}
    assert pool.members[1].state == MemberState.DRAINING


def test_one_that_speaks_but_drains_is_no_reason_to_spare_the_other(pool, clock):
    pool.service.draining(pool.members[1])
    clock.advance(PAUSE_S)
    pool.speak(1)
    assert pool.places() == {"n0"}
