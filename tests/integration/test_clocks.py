"""Clocks that jump or run slowly: leases, reservations and slots hold, since nothing of them asks for the time of day.

Row 13 of the fault matrix. libfaketime tells one process another time, at run time.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.integration.conftest import random_chain
from tests.integration.faulting import BLOCKS, FaultPool, give_up_a_block, rejoin
from tests.waiting import eventually

LIBRARIES = [Path(f"/usr/lib/{machine}-linux-gnu/faketime/libfaketimeMT.so.1") for machine in ("x86_64", "aarch64")]
LIBRARY = next((path for path in LIBRARIES if path.exists()), None)
CLOCKS = ["+3600", "-3600", "+3600 x0.5"]
"""An hour fast, an hour slow, and fast at half its pace."""

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs libfaketime (Debian: faketime)")


@dataclass
class ClockPool(FaultPool):
    """A pool with long leases, one process of which, ``wrong``, has a clock that can be set."""

    wrong: str = ""

    def environ(self, name: str) -> dict[str, str]:
        environ = super().environ(name)
        if name != self.wrong:
            return environ
        self.set_clock("+0")
        # The time of day alone: what is called monotonic neither jumps nor changes its pace.
        clock = {"FAKETIME_TIMESTAMP_FILE": str(self.clock), "FAKETIME_NO_CACHE": "1", "LD_PRELOAD": str(LIBRARY)}
        return environ | clock | {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}

    @property
    def clock(self) -> Path:
        return self.directory / "clock"

    def set_clock(self, offset: str) -> None:
        new = self.directory / "clock.new"
        new.write_text(offset)
        new.rename(self.clock)

    def start_meta(self, **options: object) -> None:
        super().start_meta(**({"lease-max": "60s", "reservation-ttl": "60s"} | options))

    def tells(self, name: str) -> datetime:
        """What a process's clock said when it last wrote to its log."""
        lines = (self.directory / f"{name}.log").read_bytes().splitlines()
        return datetime.fromisoformat(msgspec.json.decode(lines[-1])["timestamp"])


@pytest.fixture
def start(tmp_path):
    with ExitStack() as stack:

        def start(wrong: str) -> ClockPool:
            pool = ClockPool(tmp_path, stack, wrong=wrong)
            pool.start()
            return pool

        yield start


def assert_that_it_was_wrong(pool: ClockPool) -> None:
    """Otherwise nothing was tested: what the process writes now is an hour off."""
    rejoin(pool, "n0")
    eventually(lambda: pool.state_of("n0") == "ready")
    assert abs(pool.tells(pool.wrong) - datetime.now(UTC)) > timedelta(minutes=50)


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_lease_holds_when_the_service_s_clock_jumps(start, clock):
    pool = start("meta")
    chain = random_chain(3)
    pool.put_again(chain)
    assert pool.keyspace.match(chain, lease_s=60).blocks == 3
    reservation = pool.keyspace.reserve(random_chain(2))

    pool.set_clock(clock)
    for _ in range(4):
        pool.put(random_chain(BLOCKS // 2))

    assert pool.has(chain), "leased, and everything else has been evicted"
    counters = pool.client.status().counters
    assert (counters["leases"], counters["reservations"]) == (1, 1)
    assert len(pool.keyspace.write(reservation, [bytes(8192)] * 2).committed) == 2
    assert pool.nodes.keys() == {node.node_id for node in pool.client.status().nodes if node.state == "ready"}
    assert_that_it_was_wrong(pool)
    assert pool.history.violations() == []


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_slot_is_its_writer_s_when_the_node_s_clock_jumps(start, clock):
    pool = start("n0")
    chain, other = pool.put_on("n0", 1), pool.put_on("n0", 1)
    more = [*chain, *random_chain(3)]
    with pool.actor("shm") as writer:
        writer.points.arm("client.put.before_commit", "pause")
        writer.begin("put", chain=more, attempt=pool.attempt(), timeout_s=30.0)
        writer.points.wait_until_hit("client.put.before_commit")

        pool.set_clock(clock)
        give_up_a_block(pool, other)
        eventually(
            lambda: not pool.client.status().counters["orders_pending"]
        )  # a heartbeat says so: it is past expiry
        writer.points.release("client.put.before_commit")
        assert writer.result(pool.history).stored == 3

    assert pool.has(more)
    assert pool.stat("n0").counters["expired_writes"] == 0
    assert_that_it_was_wrong(pool)
    assert pool.history.violations() == []
