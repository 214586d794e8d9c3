"""Reading blocks from a node's disk, next to the same bytes read raw, past the page cache, from the same file."""

import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool.bench.measure import GB, at_least, compare, pool_processes, rounded
from kvpool.client import Client, Keyspace
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.limits import HASH_BYTES
from kvpool.core.namespace import Namespace
from kvpool.node.disk.files import STEM
from kvpool.node.segment import aligned
from kvpool.node.segment.disk import RUN_BYTES, THREADS

BLOCK_BYTES = (64 << 10, 1 << 20, 2 << 20)
TRANSPORTS = ("shm", "tcp")
SIZE_BYTES = 256 << 20
"""Read in each round."""

SETTLE_TRIES = 1_000


class DiskReadRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="disk_read"):
    """GB/s of verified loads of blocks that lie on disk alone, and of raw reads with as many threads as the node."""

    transport: str
    block_bytes: int
    gb_per_s: float
    limit_gb_per_s: float
    ratio: float


def measure_disk(folder: Path, block_bytes: int, rounds: int = 5) -> Iterator[DiskReadRow]:
    """Measure each transport with a node whose disk is in ``folder``; raises KvpoolError."""
    at_least("rounds", rounds)
    blocks = SIZE_BYTES // block_bytes
    namespace = Namespace(model="kvpool-bench-disk", block_tokens=16, block_bytes=block_bytes)
    chain = [os.urandom(HASH_BYTES) for _ in range(blocks)]
    buffer = np.empty((blocks, block_bytes), np.uint8)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir=folder)))
        pool = stack.enter_context(pool_processes(SIZE_BYTES, disk=(place, 2 * SIZE_BYTES)))
        with kvpool.connect(pool.uri, timeout_s=60.0) as client:
            _put_on_disk(client, client.namespace(namespace), chain, buffer)
        for transport in TRANSPORTS:
            client = stack.enter_context(kvpool.connect(pool.uri, transports=[transport], timeout_s=60.0))
            keyspace = client.namespace(namespace)
            raw = stack.enter_context(_Raw(place / f"{STEM}.payload"))
            compared = compare(lambda k=keyspace: _load(k, chain, buffer), raw.read, rounds, pool.pids)  # type: ignore[misc]
            yield DiskReadRow(
                transport=transport,
                block_bytes=block_bytes,
                gb_per_s=rounded(SIZE_BYTES / statistics.median(compared.ours_s) / GB),
                limit_gb_per_s=rounded(SIZE_BYTES / statistics.median(compared.limit_s) / GB),
                ratio=rounded(compared.ratio),
            )


def _put_on_disk(client: Client, keyspace: Keyspace, chain: list[bytes], buffer: NDArray[np.uint8]) -> None:
    """Store and read a chain that fills memory, and then push it out; nothing comes back from disk after that."""
    keyspace.store(chain, buffer)
    _load(keyspace, chain, buffer)
    for _ in range(SETTLE_TRIES):
        if client.status().counters["demoted_blocks"] == len(chain):
            break
    else:
        raise UnavailableError(f"the disk has not taken {len(chain)} blocks; it may be off: see `kvpool status`")
    keyspace.store([os.urandom(HASH_BYTES) for _ in chain], buffer)
    [node] = client.status().nodes
    client.drain(node.node_id, stay=True)  # what drains takes nothing, not even from its own disk


def _load(keyspace: Keyspace, chain: list[bytes], buffer: NDArray[np.uint8]) -> None:
    loaded = keyspace.load(chain, buffer).loaded
    if loaded != len(chain):
        raise KvpoolError(f"only {loaded} of {len(chain)} blocks were loaded")


class _Raw:
    """Reads the beginning of a file with the node's number of threads."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._threads = ThreadPoolExecutor(THREADS)
        self._memory = [aligned(RUN_BYTES) for _ in range(THREADS)]

    def read(self) -> None:
        """All `SIZE_BYTES`, each thread its own stretches."""
        list(self._threads.map(self._read_some, range(THREADS)))

    def _read_some(self, thread: int) -> None:
        for offset in range(thread * RUN_BYTES, SIZE_BYTES, THREADS * RUN_BYTES):
            os.preadv(self._descriptor, [self._memory[thread]], offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)
