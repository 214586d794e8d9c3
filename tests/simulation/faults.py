"""What goes wrong in a schedule, and when."""

from dataclasses import dataclass

import numpy as np

from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState

from .memory import records_of
from .network import Weather

FAULTS = (
    "crash_meta",
    "crash_node",
    "crash_client",
    "pause_meta",
    "pause_node",
    "pause_client",
    "replace_meta",
    "partition",
    "one_way",
    "flip_bit",
    "loss",
    "break_stream",
)


@dataclass
class Plan:
    """How a schedule is disturbed."""

    weather: Weather
    faults: list
    stall_rate: float = 0.01

    @property
    def calm(self):
        return not self.faults and self.weather.calm


def draw_plan(rng, length_s):
    """A plan for ``length_s`` seconds: one schedule in seven is calm."""
    if rng.random() < 0.15:
        return Plan(Weather(delay_s=rng.choice((0.001, 0.02))), [])
    weather = Weather(
        delay_s=rng.choice((0.001, 0.01, 0.05)),
        slow=rng.choice((0.0, 0.05)),
        lost=rng.choice((0.0, 0.0, 0.02)),
        dead=rng.choice((0.0, 0.0, 0.003)),
        reset=rng.choice((0.0, 0.0, 0.01)),
        twice=rng.choice((0.0, 0.02, 0.1)),
    )
    kinds = rng.sample(FAULTS, rng.randint(0, 3))
    faults = sorted((rng.random() * length_s, kind) for kind in kinds for _ in range(rng.randint(1, 2)))
    return Plan(weather, faults, rng.choice((0.005, 0.03, 0.1)))


class Fates:
    """Brings the faults of a plan about, and at the end mends everything."""

    def __init__(self, cluster, plan, restart_client):
        self.cluster = cluster
        self.scheduler = cluster.scheduler
        self.rng = cluster.scheduler.rng
        self.restart_client = restart_client
        self.flips = 0
        self.counts = {}
        self._mended = False
        for at_s, kind in plan.faults:
            self.scheduler.at(at_s, self._strike, kind)

    @property
    def spoiled(self):
        """Whether committed bytes may be other ones: a bit was flipped, or a writer outlived its node's quarantine."""
        return bool(self.flips or self.counts.get("crash_node"))

    def mend(self):
        """Heal the network, continue and restart everything; no client comes back."""
        self._mended = True
        network = self.cluster.network
        network.heal()
        network.weather = Weather()
        self.scheduler.stall_rate = 0.0
        for process in self._processes():
            if process.paused:
                self.scheduler.resume(process)
            if not process.alive:
                network.forget(process)
        if not self.cluster.meta.process.alive:
            self.cluster.meta.start()
        for node in self.cluster.nodes:
            if not node.process.alive:
                node.start()

    def _processes(self):
        self._known = getattr(self, "_known", [])
        owners = [self.cluster.meta, *self.cluster.nodes, *self.cluster.clients]
        for owner in owners:
            if owner.process is not None and owner.process not in self._known:
                self._known.append(owner.process)
        return self._known

    def _strike(self, kind):
        if not self._mended:
            self._processes()
            self.counts[kind] = self.counts.get(kind, 0) + 1
            getattr(self, f"_{kind}")()
            self._processes()

    def _soon(self, callback, *args):
        self.scheduler.at(self.rng.random() * 4, callback, *args)

    def _kill(self, process):
        silent = self.rng.random() < 0.3
        self.scheduler.kill(process)
        self.cluster.network.died(process, silent=silent)
        if silent:
            self.scheduler.at(self.rng.random() * 6, self.cluster.network.forget, process)

    def _restart(self, owner, process):
        if owner.process is process and not process.alive:
            owner.start()

    def _crash_meta(self):
        self._crash(self.cluster.meta)

    def _crash_node(self):
        node = self.rng.choice(self.cluster.nodes)
        self._crash(node)
        if not node.process.alive and self.rng.random() < 0.3:
            self._tear_header(node)

    def _crash(self, owner):
        process = owner.process
        if process.alive and not process.paused:
            self._kill(process)
            self._soon(self._restart, owner, process)

    def _crash_client(self):
        client = self.rng.choice(self.cluster.clients)
        if client.process is not None and client.process.alive:
            self._kill(client.process)
            self._soon(self._restart_client, client)

    def _restart_client(self, client):
        if not self._mended and not client.process.alive:
            self.restart_client(client)

    def _pause(self, owner):
        process = owner.process
        if process is not None and process.alive and not process.paused:
            self.scheduler.pause(process)
            self.cluster.network.fell_silent(process)
            self.scheduler.at(self.rng.random() * 8, self.scheduler.resume, process)

    def _pause_meta(self):
        self._pause(self.cluster.meta)

    def _pause_node(self):
        self._pause(self.rng.choice(self.cluster.nodes))

    def _pause_client(self):
        self._pause(self.rng.choice(self.cluster.clients))

    def _replace_meta(self):
        """A stopped service is taken for dead and another started; later the old one goes on."""
        meta, network = self.cluster.meta, self.cluster.network
        old = meta.process
        if not old.alive or old.paused:
            return
        self.scheduler.pause(old)
        meta.start()
        for end in list(old.sockets):
            if end.pings or self.rng.random() < 0.5:
                self.scheduler.at(self.rng.random(), network.reset, end)
        self.scheduler.at(self.rng.random() * 8, self.scheduler.resume, old)

    def _hosts(self):
        return sorted({process.host for process in self._processes() if process.alive})

    def _partition(self):
        hosts = self._hosts()
        if len(hosts) < 2:
            return
        aside = set(self.rng.sample(hosts, self.rng.randint(1, len(hosts) - 1)))
        for source in hosts:
            for target in hosts:
                if (source in aside) != (target in aside):
                    self.cluster.network.cut(source, target)
        self._soon(self.cluster.network.heal)

    def _one_way(self):
        hosts = self._hosts()
        if len(hosts) < 2:
            return
        source, target = self.rng.sample(hosts, 2)
        self.cluster.network.cut(source, target)
        self.scheduler.at(self.rng.random() * 8, self.cluster.network.heal)

    def _break_stream(self):
        """A node's control stream breaks, and nothing else."""
        node = self.rng.choice(self.cluster.nodes)
        for end in [end for end in node.process.sockets if end.pings]:
            self.cluster.network.reset(end)

    def _flip_bit(self):
        """Bits of some committed blocks turn round."""
        node = self.rng.choice(self.cluster.nodes)
        records = records_of(node.memory)
        for page in np.flatnonzero(records["state"] == SlotState.COMMITTED).tolist():
            if self.rng.random() < 0.5:
                byte = page * PAGE_BYTES + self.rng.randrange(int(records["length"][page]))
                node.memory.payload[byte] ^= 1 << self.rng.randrange(8)
                self.flips += 1

    def _loss(self):
        """A bad half second: half of everything is late."""
        weather = self.cluster.network.weather
        before, weather.lost = weather.lost, 0.5
        self.scheduler.at(0.5, setattr, weather, "lost", before)

    def _tear_header(self, node):
        """The power of one header went while it was written."""
        records = records_of(node.memory)
        written = np.flatnonzero(records["state"] == SlotState.WRITING)
        if len(written):
            page = int(self.rng.choice(written.tolist()))
            records["hash"][page] = b"\0" * 32
