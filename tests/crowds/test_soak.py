"""Two hundred connections, constant eviction, connections that break in mid-call: nothing grows, nothing is left over.

``make soak`` runs this for ten minutes; the environment's SOAK_S says for how long otherwise.
"""

import os
import sys
import threading
import time
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest

from kvpool.ops.grpc_server import CALLS_MAX
from kvpool.transport.pool import IDLE_MAX
from kvpool.v1 import store_node_pb2, store_node_pb2_grpc
from tests.crowds.crowd import CrowdSettings
from tests.crowds.process import alike, crowds, held
from tests.waiting import eventually

SOAK_S = float(os.environ.get("SOAK_S", "60"))
WARM_UP = 0.25
"""Part of the time that buffers, tables and pools of threads get to reach the size they keep."""

SAMPLES = 60
NODES = 3
CLIENTS = 50
TRANSPORTS = ("tcp", "shm", "tcp", "unix")

CHAINS = 400
"""With chains of up to 8 blocks of 16 KiB about 50 MiB, of which the nodes hold half: every store evicts."""

GROWTH_MAX = 0.10
GROWTH_BYTES = 8 << 20
"""Memory may grow by a tenth and 8 MiB from the first sample to the last: what an allocator with some hundred threads
scatters. A leak of 200 bytes a call is more than that, even in a minute; ten minutes tell of 20 bytes."""

GROWTH_HANDLES = 8
"""Descriptors and threads, besides the tenth: broken connections are there twice for a moment."""


@dataclass
class Samples:
    """What one process held, over time."""

    name: str
    pid: int
    times_s: list[float] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def take(self) -> None:
        self.times_s.append(time.monotonic())
        self.rows.append(held(self.pid))

    def growth(self) -> list[tuple[float, float]]:
        """(first value, growth over the whole time) of the straight line through each measure's samples."""
        times = np.array(self.times_s) - self.times_s[0]
        lines = [np.polyfit(times, np.array(column, float), 1) for column in zip(*self.rows, strict=True)]
        return [(start, slope * times[-1]) for slope, start in lines]

    def line(self) -> str:
        (rss, rss_by), (fds, fds_by), (threads, threads_by) = self.growth()
        memory = f"{rss / 2**20:.1f} MiB {rss_by / 2**20:+.2f}"
        return f"{self.name}: {memory}, {fds:.0f} descriptors {fds_by:+.1f}, {threads:.0f} threads {threads_by:+.1f}"

    def is_flat(self) -> bool:
        slack = (GROWTH_BYTES, GROWTH_HANDLES, GROWTH_HANDLES)
        return all(by <= GROWTH_MAX * start + more for (start, by), more in zip(self.growth(), slack, strict=True))


@pytest.mark.timeout(SOAK_S + 240)
def test_nothing_grows_and_nothing_is_left(start_pool):
    short = {"reservation-ttl": "5s", "tombstones": 1024, "heartbeat": "500ms"}
    pool = start_pool(nodes=NODES, size="8MiB", **short)
    settings = CrowdSettings(pool.uri, CLIENTS, "", seed=100, chains=CHAINS, kills_per_s=2.0)
    services = {"meta": pool.meta.pid} | {name: node.pid for name, node in pool.nodes.items()}
    alone = {name: held(pid) for name, pid in services.items()}
    with crowds(alike(settings, TRANSPORTS), pool.directory) as running:
        pids = services | {process.name: process.pid for process in running.processes}
        _wait(SOAK_S * WARM_UP)
        samples = [Samples(name, pid) for name, pid in pids.items()]
        for _ in range(SAMPLES):
            for each in samples:
                each.take()
            _wait(SOAK_S * (1 - WARM_UP) / SAMPLES)
        before, report = running.report(), running.finish()
        said = "\n".join([*(each.line() for each in samples), str(report)])
        sys.stdout.write(said)  # shown by -s

        counts, misses = report["counts"], report["misses"]
        assert all(each.is_flat() for each in samples), said
        assert counts["wrong"] == counts["hung"] == counts["verify_failures"] == 0, said
        assert min(counts[name] for name in ("loaded_blocks", "matched_blocks", "stored_blocks", "kills")) > 0, said
        assert misses["evicted"] > 0, said
        assert report["most_retries"] <= 10 + 0.1 * before["counts"]["calls"], said
    with pool.connect("tcp") as client:
        eventually(lambda: _is_at_rest(pool, client))
    eventually(lambda: all(_is_back(held(pid), alone[name]) for name, pid in services.items()))


def _wait(seconds: float) -> None:
    """Let the crowd work; nothing is synchronised by it."""
    threading.Event().wait(seconds)


def _is_at_rest(pool, client) -> bool:
    """No lease, reservation, order, pin or resting slot is left, and the nodes hold what the directory names."""
    status = client.status()
    left = [status.counters[name] for name in ("leases", "reservations", "orders_pending", "copies")]
    named = {node.node_id: node.blocks for node in status.nodes}
    return not any(left) and all(_holds(pool.ready[name]["grpc"], named[name]) for name in pool.nodes)


def _holds(address: str, blocks: int) -> bool:
    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        stat = store_node_pb2_grpc.StoreNodeStub(channel).Stat(store_node_pb2.StatRequest(), timeout=20)
    return stat.quarantined_bytes == 0 and stat.node.segments[0].blocks == blocks and stat.connections == 0


def _is_back(now: tuple[int, int, int], alone: tuple[int, int, int]) -> bool:
    """What a service holds is that of one without clients, the connections between services, and gRPC's threads."""
    between = NODES * IDLE_MAX + GROWTH_HANDLES
    return now[1] <= alone[1] + between and now[2] <= alone[2] + between + CALLS_MAX
