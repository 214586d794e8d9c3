"""The demo: real store nodes, a metadata service, several engines, one workload, and what the pool saved.

Each engine is a thread with a client of its own. Threads, since copies, checks and waits release the
interpreter lock, and `Turns` needs no other channel; a client each, since real engines share only the pool.
"""

import contextlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

import kvpool
from kvpool.bench.engine import Engine, EngineStats, check_block_bytes, engine_of
from kvpool.bench.hitrate import DEFINITION, ideal_hit_rate, private_hit_rate
from kvpool.bench.process import RoleProcess
from kvpool.bench.workload import Workload
from kvpool.core.errors import UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import pages_of
from kvpool.ops.sources import load_settings

ENGINES_MAX = 64
NODES_MAX = 16

ENGINE_PROMPTS = 2
"""By default an engine's own cache holds this many longest prompts; a busy GPU has no more to spare."""

POOL_HEADROOM = 1.25
"""By default the pool holds all unique blocks and a quarter more, since nodes do not fill evenly."""

NODE_BYTES_MIN = 64 << 20


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to run the workload on.

    Attributes:
        engines: Engines; requests go to them round robin.
        nodes: Store nodes, one process each.
        block_bytes: KV bytes of a block; real models have more, which only makes the demo longer.
        engine_pages: Blocks each engine's own cache holds; by default `ENGINE_PROMPTS` longest prompts.
        node_bytes: Memory of a store node; by default enough for the whole workload.
        transports: Transports the clients may use, best first.
    """

    engines: int = 4
    nodes: int = 2
    block_bytes: int = 16 << 10
    engine_pages: int | None = None
    node_bytes: int | None = None
    transports: tuple[str, ...] = ("shm", "tcp")

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= ENGINES_MAX:
            raise UsageError(f"engines are {self.engines}; they must be from 1 to {ENGINES_MAX}")
        if not 1 <= self.nodes <= NODES_MAX:
            raise UsageError(f"nodes are {self.nodes}; they must be from 1 to {NODES_MAX}")
        if self.node_bytes is not None and self.node_bytes < max(PAGE_BYTES, self.block_bytes):
            raise UsageError(f"nodes of {self.node_bytes} bytes cannot hold one block; write e.g. 1GiB")
        check_block_bytes(self.block_bytes)

    def fitted(self, workload: Workload) -> "DemoSettings":
        """The same with every default worked out for ``workload``.

        Raises:
            UsageError: An engine that cannot hold the longest prompt.
        """
        longest = max(1, workload.longest_blocks)
        pages = self.engine_pages or ENGINE_PROMPTS * longest
        if pages < longest:
            raise UsageError(f"engine pages are {pages}, but the longest prompt has {longest} blocks; give as many")
        slot_bytes = pages_of(self.block_bytes) * PAGE_BYTES
        wanted = int(workload.unique_blocks() * slot_bytes * POOL_HEADROOM / self.nodes)
        node_bytes = self.node_bytes or max(NODE_BYTES_MIN, wanted)
        return msgspec.structs.replace(self, engine_pages=pages, node_bytes=node_bytes)


class NodeUse(msgspec.Struct, frozen=True):
    """What one store node held in the end."""

    node_id: str
    blocks: int
    used_bytes: int
    capacity_bytes: int


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run counted and measured; hit rates as `kvpool.bench.hitrate.DEFINITION` says.

    Attributes:
        load_gb_s: Loaded 10^9 bytes a second of the time engines spent in load calls, mean of an engine.
        store_gb_s: The same for stores, look-up of what is wanted included.
        elapsed_s: From the first request to the end of the last, computation and checks included.
        loaded_by_transport: Bytes of all loads, by the transport that carried them.
        verify_failures: Blocks that the clients themselves refused: a miss for the engine, no mismatch.
        totals: The engines' counters, summed.
    """

    workload: str
    requests: int
    input_tokens: int
    block_tokens: int
    block_references: int
    unique_blocks: int
    settings: DemoSettings
    definition: str
    private_hit_rate: float
    pool_hit_rate: float
    ideal_hit_rate: float
    load_gb_s: float | None
    store_gb_s: float | None
    mismatches: int
    verify_failures: int
    loaded_by_transport: dict[str, int]
    elapsed_s: float
    totals: EngineStats
    nodes: tuple[NodeUse, ...]


class Turns:
    """Decides when a request may begin: once what it will find in an ideal cache has been saved.

    That is when the request that first brought the deepest known block of its chain is done, since that one
    waited in turn for its own. So a conversation's turns, and the first users of one system prompt, run one
    after the other and all else at once; no two requests compute the same block, and the hit rate is well
    defined. Requests wait for earlier ones only, and engines take theirs in order: somebody can always go on.
    """

    def __init__(self, workload: Workload) -> None:
        self._waits_for = _first_bringers(workload)
        self._done = [False] * len(workload.requests)
        self._ended = False
        self._changed = threading.Condition()

    def wait(self, index: int) -> bool:
        """Wait until request ``index`` may begin; False when the run has ended early."""
        before = self._waits_for[index]
        with self._changed:
            self._changed.wait_for(lambda: self._ended or before is None or self._done[before])
            return not self._ended

    def finish(self, index: int) -> None:
        """Request ``index`` has been served and its blocks saved."""
        with self._changed:
            self._done[index] = True
            self._changed.notify_all()

    def end(self) -> None:
        """End the run early: nobody waits any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def run_demo(workload: Workload, settings: DemoSettings, on_request: Callable[[], None] = lambda: None) -> DemoReport:
    """Start the pool, run the engines, count, stop the pool.

    Args:
        workload: The requests, in order.
        settings: What to run them on.
        on_request: Called after each request, from any thread.

    Raises:
        UsageError: Settings that do not fit the workload; nothing was started.
        UnavailableError: The pool did not start, or went away.
    """
    settings = settings.fitted(workload)
    namespace = kvpool.Namespace(
        model="kvpool-demo", block_tokens=workload.block_tokens, block_bytes=settings.block_bytes
    )
    with contextlib.ExitStack() as stack:
        uri = stack.enter_context(pool_of(settings.nodes, settings.node_bytes or NODE_BYTES_MIN))
        pools = [
            stack.enter_context(kvpool.connect(uri, transports=settings.transports)) for _ in range(settings.engines)
        ]
        engines = [
            Engine(
                settings.engine_pages or 1,
                settings.block_bytes,
                workload.block_tokens,
                pool.namespace(namespace),
            )
            for pool in pools
        ]
        began_s = time.perf_counter()
        serve_all(workload, engines, on_request)
        elapsed_s = time.perf_counter() - began_s
        nodes = tuple(NodeUse(n.node_id, n.blocks, n.used_bytes, n.capacity_bytes) for n in pools[0].status().nodes)
        clients = [pool.stats() for pool in pools]
    totals = sum((engine.stats() for engine in engines), EngineStats())
    return _report(workload, settings, totals, clients=clients, nodes=nodes, elapsed_s=elapsed_s)


def serve_all(workload: Workload, engines: Sequence[Engine], on_request: Callable[[], None]) -> None:
    """Run the requests on the engines, one thread each; the first error ends all and is raised."""
    turns = Turns(workload)

    def drive(number: int) -> None:
        try:
            for i in range(len(workload.requests)):
                if engine_of(i, len(engines)) == number and turns.wait(i):
                    engines[number].serve(workload.requests[i])
                    turns.finish(i)
                    on_request()
        except BaseException:
            turns.end()
            raise

    with ThreadPoolExecutor(len(engines), "engine") as executor:
        try:
            for future in [executor.submit(drive, number) for number in range(len(engines))]:
                future.result()
        finally:
            turns.end()  # an interrupt lands here: without this the executor would wait for all requests


@contextlib.contextmanager
def pool_of(nodes: int, node_bytes: int) -> Iterator[str]:
    """A metadata service and ``nodes`` store nodes on free loopback ports; yields the pool's address.

    Segments lie in a folder of their own, removed in the end: a node leaves them there for its next start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-demo-")))
        memory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvpool-demo-", dir=load_settings().node.segment_dir)
        )
        options: dict[str, object] = {"grpc-port": 0, "framed-port": 0, "expected-nodes": nodes}
        meta = stack.enter_context(RoleProcess("meta", options, folder / "meta.log"))
        uri = str(meta.ready()["uri"])
        started = []
        for i in range(nodes):
            options = {
                "node-id": f"node-{i + 1}",
                "meta": uri,
                "size": node_bytes,
                "segment-dir": memory,
                "unix-socket": folder / f"node-{i + 1}.sock",
                "data-port": 0,
                "grpc-port": 0,
            }
            started.append(stack.enter_context(RoleProcess("node", options, folder / f"node-{i + 1}.log")))
        for node in started:
            node.ready()
        yield uri


def _first_bringers(workload: Workload) -> list[int | None]:
    """For each request the one that first had the deepest block that it shares with earlier ones."""
    first: dict[bytes, int] = {}
    bringers: list[int | None] = []
    for i, request in enumerate(workload.requests):
        bringer = None
        for block in request.hashes:
            known = first.setdefault(block, i)
            if known != i:
                bringer = known
        bringers.append(bringer)
    return bringers


def _report(
    workload: Workload,
    settings: DemoSettings,
    totals: EngineStats,
    *,
    clients: Sequence[kvpool.ClientStats],
    nodes: tuple[NodeUse, ...],
    elapsed_s: float,
) -> DemoReport:
    return DemoReport(
        workload=workload.name,
        requests=len(workload.requests),
        input_tokens=workload.input_tokens,
        block_tokens=workload.block_tokens,
        block_references=workload.block_references,
        unique_blocks=workload.unique_blocks(),
        settings=settings,
        definition=DEFINITION,
        private_hit_rate=private_hit_rate(workload, settings.engines, settings.engine_pages or 1),
        pool_hit_rate=totals.hit_rate,
        ideal_hit_rate=ideal_hit_rate(workload),
        load_gb_s=_gb_s(totals.loaded_bytes, totals.load_s),
        store_gb_s=_gb_s(totals.stored_bytes, totals.store_s),
        mismatches=totals.mismatches,
        verify_failures=sum(client.verify_failures for client in clients),
        loaded_by_transport=dict(sum((Counter(client.loaded_bytes) for client in clients), Counter())),
        elapsed_s=elapsed_s,
        totals=totals,
        nodes=nodes,
    )


def _gb_s(size_bytes: int, duration_s: float) -> float | None:
    """None where nothing was moved: no rate was measured."""
    return size_bytes / duration_s / 1e9 if size_bytes else None
