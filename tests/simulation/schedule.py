"""One schedule: a seed decides everything that happens in it; what it broke comes back as sentences."""

import itertools
import traceback
from dataclasses import dataclass, field
from random import Random

from kvpool.ops.settings import MetaSettings
from kvpool.testing.history import History

from .cluster import ClientHost, Cluster, Node, wired
from .faults import Fates, draw_plan
from .network import Network
from .quiescence import check_quiescent
from .scheduler import Scheduler
from .shims import simulated
from .witness import Witness
from .workload import Engine

QUARANTINE_S = 3.0
LENGTH_S = 8.0
REST_S = 16.0
"""Longer than every time-out, lease, reservation and quarantine after each other."""

SETTINGS = MetaSettings(
    lease_max_s=3,
    lease_cap=0.5,
    reservation_ttl_s=3,
    heartbeat_s=1,
    node_ttl_s=3,
    recovery_wait_s=1,
    recovery_deadline_s=6,
    tombstones=64,
)


@dataclass
class Outcome:
    """What a schedule did, and what was wrong with it."""

    seed: int
    violations: list
    history: History
    steps: int
    commits: int = 0
    loaded: int = 0
    hits: int = 0
    faults: dict = field(default_factory=dict)


def run_schedule(seed):
    """Run the schedule of ``seed``."""
    with simulated(QUARANTINE_S), wired(), Scheduler(seed) as scheduler:
        return _Schedule(scheduler).run()


class _Schedule:
    def __init__(self, scheduler):
        self.scheduler = scheduler
        rng = self.rng = scheduler.rng
        self.history = History()
        self.witness = Witness(self.history)
        self.plan = draw_plan(rng, LENGTH_S)
        self.calm = not self.plan.faults and self.plan.weather.calm
        network = Network(scheduler, self.plan.weather)
        cluster = self.cluster = Cluster(scheduler, network, self.witness, SETTINGS)
        self.witness.cluster = cluster
        cluster.nodes = [Node(cluster, i, rng.randint(4, 8)) for i in range(rng.randint(1, 3))]
        hosts = [node.host for node in cluster.nodes] + ["engine-host"]
        cluster.clients = [ClientHost(cluster, i, rng.choice(hosts), 1.0) for i in range(rng.randint(1, 3))]
        self.attempts = itertools.count(1)
        self.engines = []

    def run(self):
        scheduler, cluster, violations = self.scheduler, self.cluster, []
        try:
            cluster.meta.start()
            for node in cluster.nodes:
                node.start()
            for client in cluster.clients:
                scheduler.at(self.rng.random() * 2, self.start_client, client)
            fates = Fates(cluster, self.plan, self.start_client)
            scheduler.run(scheduler.now_s + LENGTH_S)
            fates.mend()
            scheduler.run(scheduler.now_s + REST_S)
            violations = check_quiescent(cluster, fates)
        except Exception:  # noqa: BLE001 - whatever a thread raises, or an invariant, is a finding
            fates = None
            violations = [traceback.format_exc()]
        violations += self.witness.violations + self.history.violations()
        if self.calm:
            violations += [f"calm, yet missed under a lease: {m}" for e in self.engines for m in e.missed_in_lease]
        return Outcome(
            seed=scheduler.seed,
            violations=violations,
            history=self.history,
            steps=scheduler.steps,
            commits=self.witness.commits,
            loaded=sum(engine.loaded for engine in self.engines),
            hits=sum(engine.hits for engine in self.engines),
            faults={**(fates.counts if fates else {}), **cluster.network.counts},
        )

    def start_client(self, client):
        rng = Random(self.rng.getrandbits(64))

        def work(connected):
            engine = Engine(self.history, rng, client.process, rng.randint(4, 10), self.attempts, 0.8)
            self.engines.append(engine)
            engine.run(connected)

        client.start(work)
