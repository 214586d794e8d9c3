"""One hot prefix, read by several clients over tcp: how fast from the node that holds it, and from two that do."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool.bench.measure import GB, at_least, child, heard, pool_processes, rounded, say, settle
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.limits import HASH_BYTES
from kvpool.core.namespace import Namespace, parse_namespace

COPYING_TIMEOUT_S = 60.0
NODES = 2
HOT_READS_PER_S = 0.1
"""So little makes the prefix hot, so that it is copied before anything is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What to measure.

    Attributes:
        clients: Processes that read.
        blocks: Blocks of the prefix.
        block_bytes: Their size.
        seconds: Time of each measurement.
    """

    clients: int = 2
    blocks: int = 32
    block_bytes: int = 1 << 20
    seconds: float = 5.0


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="replicas"):
    """GB/s of all clients together, each loading the same prefix again and again."""

    copies: int
    clients: int
    gb_per_s: float


def measure_replicas(settings: ReplicaSettings) -> Iterator[ReplicaRow]:
    """Read with one copy, then with two; raises KvpoolError when a client reads less than all."""
    at_least("clients", settings.clients)
    at_least("blocks", settings.blocks)
    for copies in range(1, NODES + 1):
        yield _measure(settings, copies)


def report_reads(uri: str, document: bytes, chain: bytes, seconds: float) -> None:
    """In a child: read the chain for so long, and say how many bytes a second that came to."""
    with kvpool.connect(uri, transports=["tcp"], timeout_s=30.0) as client:
        keyspace = client.namespace(parse_namespace(document))
        buffer = np.empty((len(chain) // HASH_BYTES, keyspace.namespace.block_bytes), np.uint8)
        _load(keyspace, chain, buffer)
        say("ready")
        input()
        began_s, loads = time.monotonic(), 0
        while time.monotonic() < began_s + seconds:
            _load(keyspace, chain, buffer)
            loads += 1
        say(int(loads * buffer.nbytes / (time.monotonic() - began_s)))


def _measure(settings: ReplicaSettings, copies: int) -> ReplicaRow:
    size_bytes = settings.blocks * settings.block_bytes
    hot: dict[str, Any] = {"replica_read_rate": HOT_READS_PER_S, "replica_budget": 1.0}
    namespace = Namespace(model="kvpool-bench", block_tokens=16, block_bytes=settings.block_bytes)
    chain = os.urandom(settings.blocks * HASH_BYTES)
    with ExitStack() as stack:
        pool = stack.enter_context(
            pool_processes(2 * size_bytes, nodes=NODES, meta_unix=False, ucx=False, replicas_max=copies, **hot)
        )
        client = stack.enter_context(kvpool.connect(pool.uri, transports=["tcp"], timeout_s=30.0))
        keyspace = client.namespace(namespace)
        buffer = np.ones((settings.blocks, settings.block_bytes), np.uint8)
        if keyspace.store(chain, buffer).stored != settings.blocks:
            raise KvpoolError("the prefix was not stored")
        _wait_for_copies(client, keyspace, chain, buffer, (copies - 1) * settings.blocks)
        arguments = (pool.uri, namespace.document, chain, settings.seconds)
        readers = [stack.enter_context(child(report_reads, *arguments)) for _ in range(settings.clients)]
        for reader in readers:
            heard(reader)
        settle(pool.pids)
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("\n")
            reader.stdin.flush()
        bytes_per_s = sum(int(heard(reader)) for reader in readers)
    return ReplicaRow(copies=copies, clients=settings.clients, gb_per_s=rounded(bytes_per_s / GB))


def _wait_for_copies(
    client: kvpool.Client, keyspace: kvpool.Keyspace, chain: bytes, buffer: NDArray[np.uint8], blocks: int
) -> None:
    """Read until the pool has made so many further copies."""
    give_up_s = time.monotonic() + COPYING_TIMEOUT_S
    while client.status().counters["surplus_blocks"] != blocks:
        if time.monotonic() > give_up_s:
            raise UnavailableError(f"the prefix was not copied in {COPYING_TIMEOUT_S:g} s")
        _load(keyspace, chain, buffer)


def _load(keyspace: kvpool.Keyspace, chain: bytes, buffer: NDArray[np.uint8]) -> None:
    loaded = keyspace.load(chain, buffer).loaded
    if loaded != len(buffer):
        raise KvpoolError(f"only {loaded} of {len(buffer)} blocks were loaded")
