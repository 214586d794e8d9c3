"""A metadata service that stops in the middle of a call, is replaced, and goes on: it then harms nobody.

Rows 7 and 10 of the fault matrix; `test_recovery.py` has those without a call under way.
"""

import signal
from contextlib import ExitStack

import pytest

from tests.integration.conftest import random_chain
from tests.integration.faulting import NODES, TIMEOUT_S, FaultPool
from tests.waiting import eventually, is_frozen


@pytest.mark.parametrize(
    "point",
    ["meta.reserve.before_place", "meta.reserve.before_answer", "meta.commit.before_take", "meta.commit.before_answer"],
)
def test_what_a_replaced_service_goes_on_with_harms_nobody(tmp_path, point):
    with ExitStack() as stack:
        old = FaultPool(tmp_path, stack)
        old.start()
        kept, chain = random_chain(4), random_chain(3)
        old.put_again(kept)
        reservation = old.keyspace.reserve(random_chain(2))
        old.points("meta").arm(point, "stop")
        old.put(chain)
        old.points("meta").wait_until_hit(point)
        pid = old.meta.pid
        eventually(lambda: is_frozen(pid))

        new = FaultPool(tmp_path, stack, history=old.history, attempts=old.attempts)
        try:
            for node in old.nodes.values():
                old.kill(node)
            new.start()
            assert new.has(kept)
            new.put_again(chain)
        finally:
            old.signal(old.meta, signal.SIGCONT)

        eventually(lambda: [node.state for node in old.client.status().nodes] == ["lost"] * NODES)
        assert old.keyspace.write(reservation, [bytes(8192)] * 2, timeout_s=TIMEOUT_S).committed == ()
        assert old.put(random_chain(2)).stored == 0
        assert old.keyspace.match(chain).blocks == 0
        assert new.has(chain)
        assert new.has(kept)
        new.settle()
