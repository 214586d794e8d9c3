"""Replays a trace against real services with real bytes: what is hit, how long each step takes, and what it costs.

Callers have no prefix cache of their own, so that the hit rate is the pool's and can be held against the simulator's
for the same capacity. A caller computes what was not hit (fills it with the bytes that the blocks must have), and
compares every byte that it loads.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import StrEnum

import msgspec

import kvpool
from kvpool.bench.demo import ENGINES_MAX, NODES_MAX, Turns
from kvpool.bench.engine import Buffers, Engine, EngineStats, Loaded, Matched, Pool, Stored, check_block_bytes
from kvpool.bench.measure import GB, cpu_s, percentile, pool_processes, rounded
from kvpool.bench.simulate import SimulateSettings, simulate
from kvpool.bench.workload import Workload
from kvpool.core.errors import UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import pages_of

STEPS = ("match", "load", "store")
PERCENTILES = (50, 90, 99, 100)
SPEED_MAX = 100_000.0
SLICES = 100
"""Points of the curves over time."""


class Loop(StrEnum):
    """When a request begins."""

    CLOSED = "closed"
    """When a caller is free, and what it can find in an ideal cache has been saved."""
    OPEN = "open"
    """When it arrived in the trace, as far as a caller is free."""


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is replayed.

    Attributes:
        capacity: Part of the workload's unique blocks that the pool may hold (``10%``).
        policy: Eviction policy of the pool.
        loop: When requests begin.
        speed: How many times faster than in the trace they arrive; for an open loop.
        callers: Callers, a thread and a connection each.
        nodes: Store nodes, one process each.
        block_bytes: KV bytes of a block.
        transports: Transports that callers may use, best first.

    Raises:
        UsageError: A number is not valid.
    """

    capacity: str = "10%"
    policy: str = "lru"
    loop: Loop = Loop.CLOSED
    speed: float = 1.0
    callers: int = 1
    nodes: int = 2
    block_bytes: int = 16 << 10
    transports: tuple[str, ...] = ("shm", "tcp")

    def __post_init__(self) -> None:
        if not 1 <= self.callers <= ENGINES_MAX:
            raise UsageError(f"callers are {self.callers}; they must be from 1 to {ENGINES_MAX}")
        if not 1 <= self.nodes <= NODES_MAX:
            raise UsageError(f"nodes are {self.nodes}; they must be from 1 to {NODES_MAX}")
        if not 0 < self.speed <= SPEED_MAX:
            raise UsageError(f"speed is {self.speed:g}; it must be above 0 and at most {SPEED_MAX:g}")
        check_block_bytes(self.block_bytes)


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one kind of call, in milliseconds; ``gb_s`` are 10^9 bytes a second within its calls."""

    step: str
    calls: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    gb_s: float | None


class TraceRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="trace"):
    """What a replay counted and measured.

    Attributes:
        workload: Name of the trace.
        settings: How it was replayed.
        requests: Requests that were replayed.
        capacity_blocks: Blocks that the pool had room for.
        hit_rate: As `kvpool.bench.hitrate.DEFINITION` says.
        simulated_hit_rate: That of `kvpool simulate` for the same capacity and policy.
        ideal_hit_rate: Of an infinite cache.
        steps: Latencies of the calls.
        loaded_bytes: Loaded and compared.
        stored_bytes: Stored.
        loaded_by_transport: The former, by the transport that carried them.
        evicted_blocks: Blocks that the pool gave up for others.
        refused_blocks: Blocks that it had no room for.
        mismatches: Loaded blocks with a wrong byte; there is none.
        late_p99_ms: Open loop: how late requests began for want of a free caller.
        elapsed_s: From the first request to the end of the last.
        cpu_s_per_gb: CPU of all processes, the callers' computing and comparing included, for each GB moved.
    """

    workload: str
    settings: TraceSettings
    requests: int
    capacity_blocks: int
    hit_rate: float
    simulated_hit_rate: float
    ideal_hit_rate: float
    steps: tuple[StepRow, ...]
    loaded_bytes: int
    stored_bytes: int
    loaded_by_transport: dict[str, int]
    evicted_blocks: int
    refused_blocks: int
    mismatches: int
    late_p99_ms: float | None
    elapsed_s: float
    cpu_s_per_gb: float | None


class Moment(msgspec.Struct, frozen=True):
    """The state after a slice of the requests, for curves over time: seconds since the beginning, and totals."""

    at_s: float
    requests: int
    totals: EngineStats


class TraceRun(msgspec.Struct, frozen=True):
    """A replay: its row, the seconds of each call by step, and its course."""

    row: TraceRow
    times_s: dict[str, list[float]]
    course: list[Moment]


class Timed:
    """A pool whose calls are timed; like `Engine`, for one thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.times_s: dict[str, list[float]] = {step: [] for step in STEPS}

    def match(self, hashes: bytes, *, lease_s: float) -> Matched:
        """See `Pool.match`."""
        with self._timed("match"):
            return self._pool.match(hashes, lease_s=lease_s)

    def load(self, hashes: bytes, buffers: Buffers, *, first: int) -> Loaded:
        """See `Pool.load`."""
        with self._timed("load"):
            return self._pool.load(hashes, buffers, first=first)

    def store(self, hashes: bytes, buffers: Buffers, *, first: int) -> Stored:
        """See `Pool.store`."""
        with self._timed("store"):
            return self._pool.store(hashes, buffers, first=first)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.times_s[step].append(time.perf_counter() - began_s)


def run_trace(workload: Workload, settings: TraceSettings, on_request: Callable[[], None] = lambda: None) -> TraceRun:
    """Start a pool of the capacity, replay the workload, stop the pool, and simulate the same.

    Raises:
        UsageError: Settings that do not fit the workload; nothing was started.
        UnavailableError: The pool did not start, or went away.
    """
    if settings.loop is Loop.OPEN and any(request.arrival_s is None for request in workload.requests):
        raise UsageError("the workload does not say when its requests arrived; replay it with --loop closed")
    wanted = SimulateSettings(policies=(settings.policy,), capacities=(settings.capacity,))
    _, blocks = wanted.part_and_blocks(settings.capacity, workload)
    node_blocks = blocks // settings.nodes
    if node_blocks < 1:
        raise UsageError(f"capacity {settings.capacity!r} is {blocks} blocks for {settings.nodes} nodes; give more")
    node_bytes = node_blocks * pages_of(settings.block_bytes) * PAGE_BYTES
    namespace = kvpool.Namespace(
        model="kvpool-bench-trace", block_tokens=workload.block_tokens, block_bytes=settings.block_bytes
    )
    with ExitStack() as stack:
        pool = stack.enter_context(pool_processes(node_bytes, nodes=settings.nodes, policy=settings.policy))
        clients = [
            stack.enter_context(kvpool.connect(pool.uri, transports=settings.transports))
            for _ in range(settings.callers)
        ]
        timed = [Timed(client.namespace(namespace)) for client in clients]
        engines = [
            Engine(workload.longest_blocks, settings.block_bytes, workload.block_tokens, one, keeps=False)
            for one in timed
        ]
        drive = _Drive(workload, settings, engines, on_request)
        pids = (*pool.pids, os.getpid())
        used_s = cpu_s(pids)
        elapsed_s = drive.run()
        used_s = cpu_s(pids) - used_s
        evicted_blocks = clients[0].status().counters["evicted_blocks"]
        carried = sum((Counter(client.stats().loaded_bytes) for client in clients), Counter())
    [simulated] = simulate(workload, wanted)
    totals = drive.totals
    times_s = {step: [s for one in timed for s in one.times_s[step]] for step in STEPS}
    moved_gb = (totals.loaded_bytes + totals.stored_bytes) / GB
    row = TraceRow(
        workload=workload.name,
        settings=settings,
        requests=totals.requests,
        capacity_blocks=node_blocks * settings.nodes,
        hit_rate=rounded(totals.hit_rate),
        simulated_hit_rate=simulated.hit_rate,
        ideal_hit_rate=simulated.ideal_hit_rate,
        steps=tuple(_step(step, times_s[step], totals) for step in STEPS if times_s[step]),
        loaded_bytes=totals.loaded_bytes,
        stored_bytes=totals.stored_bytes,
        loaded_by_transport=dict(carried),
        evicted_blocks=evicted_blocks,
        refused_blocks=totals.refused_blocks,
        mismatches=totals.mismatches,
        late_p99_ms=rounded(1e3 * percentile(drive.late_s, 99)) if drive.late_s else None,
        elapsed_s=rounded(elapsed_s),
        cpu_s_per_gb=rounded(used_s / moved_gb) if moved_gb else None,
    )
    return TraceRun(row, times_s, drive.course)


class _Drive:
    """Gives the requests to callers, each the next one as soon as it is free.

    Attributes:
        late_s: Open loop: how late each request began.
        course: A moment for each slice of the requests.
    """

    def __init__(
        self, workload: Workload, settings: TraceSettings, engines: list[Engine], on_request: Callable[[], None]
    ) -> None:
        self._requests = workload.requests
        self._turns = Turns(workload) if settings.loop is Loop.CLOSED else None
        self._speed = settings.speed
        self._engines = engines
        self._on_request = on_request
        self._lock = threading.Lock()
        self._next = 0
        self._done = 0
        self._ended = threading.Event()
        self._began_s = 0.0
        self.late_s: list[float] = []
        self.course: list[Moment] = []

    @property
    def totals(self) -> EngineStats:
        """Counters of all callers."""
        return sum((engine.stats() for engine in self._engines), EngineStats())

    def run(self) -> float:
        """Replay all; returns the seconds it took. The first error of a caller ends all and is raised."""
        self._began_s = time.perf_counter()
        with ThreadPoolExecutor(len(self._engines), "caller") as executor:
            try:
                for future in [executor.submit(self._calls, engine) for engine in self._engines]:
                    future.result()
            finally:
                self._end()
        return time.perf_counter() - self._began_s

    def _calls(self, engine: Engine) -> None:
        try:
            while (index := self._take()) is not None and self._begins(index):
                engine.serve(self._requests[index])
                self._finish(index)
        except BaseException:
            self._end()
            raise

    def _take(self) -> int | None:
        with self._lock:
            index = self._next
            self._next += 1
            return index if index < len(self._requests) else None

    def _begins(self, index: int) -> bool:
        """Wait for the request's time; False when the run has ended early."""
        if self._turns is not None:
            return self._turns.wait(index)
        due_s = self._began_s + (self._requests[index].arrival_s or 0.0) / self._speed
        if self._ended.wait(max(0.0, due_s - time.perf_counter())):
            return False
        self.late_s.append(max(0.0, time.perf_counter() - due_s))
        return True

    def _finish(self, index: int) -> None:
        if self._turns is not None:
            self._turns.finish(index)
        with self._lock:
            self._done += 1
            every = max(1, len(self._requests) // SLICES)
            if self._done % every == 0 or self._done == len(self._requests):
                self.course.append(Moment(time.perf_counter() - self._began_s, self._done, self.totals))
        self._on_request()

    def _end(self) -> None:
        self._ended.set()
        if self._turns is not None:
            self._turns.end()


def _step(step: str, times_s: list[float], totals: EngineStats) -> StepRow:
    p50, p90, p99, most = (rounded(1e3 * percentile(times_s, percent)) for percent in PERCENTILES)
    size_bytes = {"load": totals.loaded_bytes, "store": totals.stored_bytes}.get(step)
    return StepRow(
        step=step,
        calls=len(times_s),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=most,
        gb_s=rounded(size_bytes / sum(times_s) / GB) if size_bytes else None,
    )
