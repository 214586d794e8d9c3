"""Transfers: how fast blocks move between a client's buffers and a pool, checksums on, next to the raw limit.

Client, node and metadata service are processes of their own (but for `inproc`). The working set is larger than the
caches. A call moves one chain, first block to last. Its buffers are one array, or scattered: one buffer a block, in
random order, as the pages of an engine lie.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

import kvpool
from kvpool.bench.limits import Batch, Block, CopyLimit, Limit, Op, blocks_of, shared_memory, socket_limit
from kvpool.bench.limits_ucx import children_of, ucx_limit
from kvpool.bench.measure import GB, at_least, compare, percentile, pool_processes, rounded, segment_folder
from kvpool.client.storing import step_blocks
from kvpool.core.errors import KvpoolError, UsageError
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, RESERVE_BLOCKS_MAX
from kvpool.core.units import pages_of
from kvpool.embedded import EmbeddedPool
from kvpool.ops.settings import MetaSettings, NodeSettings
from kvpool.transport.streams import STREAM_BYTES_MIN
from kvpool.transport.ucx.nixl import require_nixl

TRANSPORTS = ("shm", "unix", "tcp", "tls", "inproc", "ucx")
OPS = tuple(op.name.lower() for op in Op)
BLOCK_BYTES = (64 << 10, 1 << 20, 2 << 20)

TARGETS = {("shm", "get"): 0.8, ("shm", "put"): 0.7, ("tcp", "get"): 0.9, ("tcp", "put"): 0.9}
"""Least ratio to the limit that the design asks for."""

LAYOUTS = ("array", "scattered")

WORKING_BYTES = 256 << 20
SINGLE_SAMPLES = 256
SINGLE_BYTES = 64 << 20
"""Blocks loaded one at a time come to this much at least, so that no cache holds them."""

GET_HEADROOM = 1.3
"""A pool that is nearly full grants leases on half of it only: room enough that it is not."""

TIMEOUT_S = 60.0

_Tls = kvpool.TlsSettings | None


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        transport: One of `TRANSPORTS`.
        op: ``get`` or ``put``.
        block_bytes: Bytes of a block.
        blocks: Blocks of the working set; by default `WORKING_BYTES` of them.
        batch_bytes: Bytes that one call moves.
        rounds: Times that the working set is moved.
        threads: Threads that call.
        streams: Threads or connections that one call may use.
        layout: One of `LAYOUTS`: how the caller's buffers lie.
        node_bytes: Memory of the node; by default all that is stored fits. With less, puts evict.
    """

    transport: str = "shm"
    op: str = "get"
    block_bytes: int = 1 << 20
    blocks: int | None = None
    batch_bytes: int = 256 << 20
    rounds: int = 5
    threads: int = 1
    streams: int = 2
    layout: str = "array"
    node_bytes: int | None = None

    def __post_init__(self) -> None:
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("op", self.op, OPS)
        _one_of("layout", self.layout, LAYOUTS)
        for name in ("block_bytes", "batch_bytes", "rounds", "threads", "streams"):
            at_least(name, getattr(self, name))
        if self.blocks is not None:
            at_least("blocks", self.blocks)

    @property
    def count(self) -> int:
        """Blocks of the working set."""
        return self.blocks or max(1, WORKING_BYTES // self.block_bytes)

    @property
    def batch_blocks(self) -> int:
        """Blocks that one call moves."""
        return min(self.count, RESERVE_BLOCKS_MAX, max(1, self.batch_bytes // self.block_bytes))

    @property
    def streams_used(self) -> int:
        """Threads or connections that a call does use, by the client's own rules."""
        if self.op == "put":
            return min(self.streams, -(-self.batch_blocks // step_blocks(self.block_bytes)))
        return max(1, min(self.streams, self.batch_blocks, self.batch_blocks * self.block_bytes // STREAM_BYTES_MIN))

    @property
    def singles(self) -> int:
        """Blocks that are moved one at a time."""
        return min(self.count, max(SINGLE_SAMPLES, SINGLE_BYTES // self.block_bytes))

    @property
    def pool_bytes(self) -> int:
        """Memory of the node, worked out."""
        if self.node_bytes is not None:
            return self.node_bytes
        page_bytes = pages_of(self.block_bytes) * PAGE_BYTES
        if self.op == "put":
            # The warm-up is a round too.
            return int(page_bytes * (self.count * (self.rounds + 1) + SINGLE_SAMPLES) * GET_HEADROOM)
        return int(page_bytes * (self.count + self.singles) * GET_HEADROOM)


class TransferRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="transfer"):
    """One measurement.

    Attributes:
        gbps: 10^9 bytes a second, checked; of the median round.
        limit_gbps: The same of the raw limit; for tls, of the same pool over tcp.
        ratio: Median over the rounds of ours to the limit's next to it.
        cpu_s_per_gb: CPU seconds of client, node and metadata service together.
        p50_us_single: One call for one block, from its hash to verified (or committed) bytes.
        streams: Threads or connections that a call used; the limit's too.
        evicting: Whether the pool was too small for all that was stored.
    """

    transport: str
    op: str
    block_bytes: int
    blocks: int
    gbps: float
    limit_gbps: float
    ratio: float
    cpu_s_per_gb: float
    p50_us_single: float
    threads: int
    streams: int
    rounds: int
    layout: str
    evicting: bool


def measure_transfer(settings: TransferSettings) -> TransferRow:
    """Start a pool, move the working set in turns with the limit, and stop it.

    Raises:
        KvpoolError: The pool did not start, or did not move every block.
    """
    with contextlib.ExitStack() as stack:
        memory = shared_memory(settings.count * settings.block_bytes)
        client, pids, evicted_blocks = stack.enter_context(_connected(settings))
        limit = stack.enter_context(_limit(settings, memory))
        mover = _Mover(client, settings, memory)
        executor = stack.enter_context(ThreadPoolExecutor(settings.threads, "bench"))

        each = executor.map if settings.threads > 1 else map

        def round_of(move: Callable[[Batch], None]) -> Callable[[], None]:
            def one_round() -> None:
                for _ in each(move, mover.batches):
                    pass

            return one_round

        def prepare() -> None:
            mover.prepare()
            if isinstance(limit, _Mover):
                limit.prepare()

        compared = compare(round_of(mover.move), round_of(limit.move), settings.rounds, pids, prepare)
        p50_us_single = percentile(mover.singles_us(), 50)
        evicting = evicted_blocks() > 0
    moved_gb = settings.count * settings.block_bytes / GB
    return TransferRow(
        transport=settings.transport,
        op=settings.op,
        block_bytes=settings.block_bytes,
        blocks=settings.count,
        gbps=rounded(moved_gb / percentile(compared.ours_s, 50)),
        limit_gbps=rounded(moved_gb / percentile(compared.limit_s, 50)),
        ratio=rounded(compared.ratio),
        cpu_s_per_gb=rounded(compared.cpu_s / settings.rounds / moved_gb),
        p50_us_single=rounded(p50_us_single),
        threads=settings.threads,
        streams=settings.streams_used,
        rounds=settings.rounds,
        layout=settings.layout,
        evicting=evicting,
    )


class _Mover:
    """Moves batches through the pool: stored chains for gets, chains never seen for puts."""

    def __init__(self, client: kvpool.Client, settings: TransferSettings, memory: Block) -> None:
        namespace = kvpool.Namespace(model="kvpool-bench", block_tokens=16, block_bytes=settings.block_bytes)
        self._keyspace = client.namespace(namespace)
        self._settings = settings
        self._is_get = settings.op == "get"
        buffers = self._buffers = blocks_of(memory, settings.block_bytes)
        if settings.layout == "scattered":
            random.Random(1).shuffle(buffers)  # noqa: S311 - any order does, if it is the same every time
        self.batches: list[Batch] = []
        for first in range(0, len(buffers), settings.batch_blocks):
            end = min(first + settings.batch_blocks, len(buffers))
            whole = memory[first * settings.block_bytes : end * settings.block_bytes]
            given = whole if settings.layout == "array" else buffers[first:end]
            self.batches.append(Batch(first, buffers[first:end], given))
        self._chains: dict[int, bytes] = {}
        self._name_chains()
        if self._is_get:
            for batch in self.batches:
                self._store(self._chains[batch.first], batch.given)

    def prepare(self) -> None:
        """Before a round: puts get new chains, since a stored block is not stored again."""
        if not self._is_get:
            self._name_chains()

    def move(self, batch: Batch) -> None:
        """Load or store the batch's chain; raises KvpoolError when not every block was moved."""
        chain = self._chains[batch.first]
        if self._is_get:
            self._load(chain, batch.given)
        else:
            self._store(chain, batch.given)

    def singles_us(self) -> list[float]:
        """Microseconds of calls for one block each, chains of one block, all different as far as they go."""
        settings, buffers = self._settings, self._buffers
        hashes = [os.urandom(HASH_BYTES) for _ in range(settings.singles)]
        if self._is_get:
            for block_hash, buffer in zip(hashes, buffers, strict=False):
                self._store(block_hash, [buffer])
        times_us = []
        for i in range(SINGLE_SAMPLES):
            # Spread over all singles: neighbours would come from memory that was just used.
            k = i * len(hashes) // SINGLE_SAMPLES if len(hashes) >= SINGLE_SAMPLES else i % len(hashes)
            block_hash = hashes[k] if self._is_get else os.urandom(HASH_BYTES)
            move = self._load if self._is_get else self._store
            one = [buffers[-1 - k]]
            began_ns = time.perf_counter_ns()
            move(block_hash, one)
            times_us.append((time.perf_counter_ns() - began_ns) / 1000)
        return times_us

    def _name_chains(self) -> None:
        for batch in self.batches:
            self._chains[batch.first] = os.urandom(HASH_BYTES * len(batch.buffers))

    def _load(self, chain: bytes, buffers: list[Block] | Block) -> None:
        result = self._keyspace.load(chain, buffers)
        if result.loaded * HASH_BYTES != len(chain):
            raise KvpoolError(f"only {result.loaded} of {len(chain) // HASH_BYTES} blocks were loaded: {result}")

    def _store(self, chain: bytes, buffers: list[Block] | Block) -> None:
        result = self._keyspace.store(chain, buffers)
        if result.stored * HASH_BYTES != len(chain):
            raise KvpoolError(f"only {result.stored} of {len(chain) // HASH_BYTES} blocks were stored: {result}")


@contextlib.contextmanager
def _connected(settings: TransferSettings) -> Iterator[tuple[kvpool.Client, tuple[int, ...], Callable[[], int]]]:
    """A client of a pool of its own, the processes whose CPU time counts, this one included, and what was evicted."""
    scheme = "tcp" if settings.transport == "tls" else settings.transport
    with (
        _pool(settings) as (uri, pids, tls, observer_tls),
        kvpool.connect(uri, transports=(scheme,), timeout_s=TIMEOUT_S, streams=settings.streams, tls=tls) as client,
    ):
        yield client, pids + (children_of(pids) if scheme == "ucx" else ()), partial(_evicted, uri, observer_tls)


def _evicted(uri: str, tls: kvpool.TlsSettings | None) -> int:
    """Blocks that the pool has evicted: told to an observer, since a client sees what is its tenant's."""
    with kvpool.connect(uri, tls=tls) as observer:
        return observer.status().counters["evicted_blocks"]


@contextlib.contextmanager
def _pool(settings: TransferSettings) -> Iterator[tuple[str, tuple[int, ...], _Tls, _Tls]]:
    """A pool: its address, its processes with this one, and what its clients need, and an observer."""
    if settings.transport != "inproc":
        has = {name: settings.transport == name for name in ("ucx", "tls")}
        with pool_processes(settings.pool_bytes, ucx=has["ucx"], tls=has["tls"]) as pool:
            yield pool.uri, (os.getpid(), *pool.pids), pool.tls, pool.observer_tls
        return
    with segment_folder() as folder:
        node = NodeSettings(
            size=settings.pool_bytes, segment_dir=folder, unix_socket=folder / "node.sock", data_port=0, grpc_port=0
        )
        with EmbeddedPool(MetaSettings(grpc_port=0, framed_port=0), node) as embedded:
            yield embedded.uri, (os.getpid(),), None, None


@contextlib.contextmanager
def _limit(settings: TransferSettings, memory: Block) -> Iterator[Limit]:
    op = Op[settings.op.upper()]
    if settings.transport == "tls":
        plain = msgspec.structs.replace(settings, transport="tcp")
        with _connected(plain) as (client, *_):
            yield _Mover(client, plain, memory)
        return
    if settings.transport == "ucx":
        with ucx_limit(memory, settings.block_bytes, settings.threads, settings.streams_used) as reads:
            yield reads
        return
    if settings.transport in {"shm", "inproc"}:
        copies = CopyLimit(op, settings.count, settings.block_bytes, settings.threads, settings.streams_used)
        with contextlib.closing(copies):
            yield copies
        return
    with socket_limit(
        settings.transport, op, settings.count, settings.block_bytes, settings.threads, settings.streams_used
    ) as limit:
        yield limit


def transports_here() -> tuple[str, ...]:
    """Those of `TRANSPORTS` that can be measured with what is installed."""
    try:
        require_nixl()
    except UsageError:
        return tuple(name for name in TRANSPORTS if name != "ucx")
    return TRANSPORTS


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} {value!r} is not known; use one of {', '.join(known)}")
