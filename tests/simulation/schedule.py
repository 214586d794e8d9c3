"""One schedule: a seed decides everything that happens in it; what it broke comes back as sentences."""

import itertools
import traceback
from collections import Counter
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
    replica_read_rate=0.2,
    replica_budget=1,
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
    events: Counter = field(default_factory=Counter)


def run_schedule(seed, *, validate=False):
    """Run the schedule of ``seed``; ``validate`` checks the state machines after every change of what is stored."""
    with simulated(), wired(), Scheduler(seed) as scheduler:
        return _Schedule(scheduler, validate).run()


class _Schedule:
    def __init__(self, scheduler, validate):
        self.scheduler = scheduler
        rng = self.rng = scheduler.rng
        self.history = History()
        self.witness = Witness(self.history, validate)
        self.plan = draw_plan(rng, LENGTH_S)
        scheduler.stall_rate = self.plan.stall_rate
        network = Network(scheduler, self.plan.weather)
        cluster = self.cluster = Cluster(scheduler, network, self.witness, SETTINGS)
        self.witness.cluster = cluster
        cluster.nodes = [Node(cluster, i, rng.randint(3, 6)) for i in range(rng.randint(1, 3))]
        hosts = [node.host for node in cluster.nodes] * 2 + ["engine-host"]
        cluster.clients = [ClientHost(cluster, i, rng.choice(hosts), 1.0) for i in range(rng.randint(1, 4))]
        self.attempts = itertools.count(1)
        self.ends_s = scheduler.now_s + LENGTH_S
        self.put_share = rng.choice((0.3, 0.5, 0.7))
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
            scheduler.run(self.ends_s)
            fates.mend()
            scheduler.run(scheduler.now_s + REST_S)
            violations = check_quiescent(cluster, fates)
        except Exception:  # noqa: BLE001 - whatever a thread raises, or an invariant, is a finding
            fates = None
            violations = [traceback.format_exc()]
        violations += self.witness.violations + self.history.violations()
        if self.plan.calm:
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
            events=self.events(),
        )

    def events(self):
        """How often what makes schedules interesting happened, as far as the last processes know."""
        events = Counter()
        for node in self.cluster.nodes:
            if node.store is not None:
                events.update(node.store.stats().counters)
        directory = self.cluster.meta.service._directory.stats()
        events.update(evicted=directory.evicted_blocks, expired=directory.expired_blocks, bad=directory.bad_blocks)
        events.update(copied=directory.copied_blocks, reclaimed=directory.reclaimed_copies)
        for engine in self.engines:
            if engine.client is not None:
                events.update(engine.client.stats().misses)
                events["unverified"] += engine.client.stats().verify_failures
                events.update({f"loaded_{name}": b for name, b in engine.client.stats().loaded_bytes.items()})
        return events

    def start_client(self, client):
        rng = Random(self.rng.getrandbits(64))

        def work(connected):
            calls = rng.randint(6, 16)
            engine = Engine(self.history, rng, client.process, calls, self.attempts, self.put_share, self.ends_s)
            self.engines.append(engine)
            engine.run(connected)

        client.start(work)
