"""A pool whose processes have failpoints, deadlines that pass soon, and what must hold in it when a fault is over."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

import kvpool
from kvpool.core.slots import SlotState
from kvpool.node.headers import RECORD, ROOT_PARENT
from kvpool.ops.failpoints import VARIABLE
from kvpool.testing import History
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import Done, LocateReply, LocateRequest, ReportBadRequest, unpack
from kvpool.v1 import store_node_pb2, store_node_pb2_grpc
from tests.integration.actors import BLOCK_BYTES, NAMESPACE, Actor, get, put
from tests.integration.conftest import Pool, random_chain
from tests.integration.points import Points
from tests.waiting import eventually

SIZE = "256KiB"
NODES = 2
BLOCKS = NODES * (256 << 10) // BLOCK_BYTES
"""What the whole pool holds."""

META = {
    "heartbeat": "100ms",
    "node-ttl": "1s",
    "reservation-ttl": "1s",
    "lease-max": "500ms",
    "expected-nodes": NODES,
    "replicas-max": 1,
}
NODE = {"quarantine": "200ms", "scrub-bytes-per-s": 0}

LITTLE_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""The address space of a process is what it uses: a limit on it is felt at the next large allocation."""

PROLOGUE_BYTES = 64
TIMEOUT_S = 1.0
"""Of calls that meet a fault: they end by then."""


@dataclass
class FaultPool(Pool):
    """Two nodes, a service and a bystander, all with failpoints; and the history of what clients did."""

    history: History = field(default_factory=History)
    attempts: int = 0
    is_settled: bool = False
    """Whether the last test that used it has left it as it was."""

    def start(self) -> None:
        self.start_meta()
        for i in range(NODES):
            self.start_node(f"n{i}")
        self.client = self.connect("tcp", streams=1)
        self.keyspace = self.client.namespace(NAMESPACE)

    def start_meta(self, **options: object) -> None:
        super().start_meta(**(META | options))

    def start_node(self, name: str, size: str = SIZE, **options: object) -> None:
        super().start_node(name, size, **(NODE | options))

    def environ(self, name: str) -> dict[str, str]:
        return os.environ | LITTLE_MEMORY | {VARIABLE: str(self.points(name).directory)}

    def points(self, name: str) -> Points:
        return Points(self.directory / f"points-{name}")

    def actor(self, transport: str, name: str = "actor") -> Actor:
        """A client in a process of its own."""
        return Actor(self.uri, transport, self.points(name))

    def attempt(self) -> int:
        """A number for a put that no other one has."""
        self.attempts += 1
        return self.attempts

    # What the bystander does

    def put(self, chain: list[bytes], timeout_s: float = TIMEOUT_S) -> kvpool.StoreResult:
        return self._record(put(self.keyspace, chain, self.attempt(), timeout_s))

    def get(self, chain: list[bytes], timeout_s: float = TIMEOUT_S) -> kvpool.LoadResult:
        return self._record(get(self.keyspace, chain, timeout_s))

    def _record(self, done: tuple) -> object:
        result, records = done
        for record in records:
            self.history.add(record)
        return result

    def state_of(self, name: str) -> str | None:
        return next((node.state for node in self.client.status().nodes if node.node_id == name), None)

    def has(self, chain: list[bytes]) -> bool:
        return self.get(chain).loaded == len(chain)

    def put_again(self, chain: list[bytes]) -> None:
        """The chain can be stored, and read, whatever happened to it."""

        def stored() -> bool:
            self.put(chain)
            return self.has(chain)

        eventually(stored)

    def put_on(self, name: str, blocks: int) -> list[bytes]:
        """A chain that has been stored, all of it on one node."""
        while True:
            chain = random_chain(blocks)
            self.put_again(chain)
            if self.located(chain) <= self.headers()[name]:
                return chain

    # What must hold when a fault is over

    def settle(self) -> None:
        """Everything is back, nothing is left over, directory and nodes agree, and all memory can be used again."""
        eventually(self.is_quiet)
        self.agree()
        self.fill()
        eventually(self.is_quiet)
        self.agree()
        assert self.history.violations() == []
        self.is_settled = True

    def is_quiet(self) -> bool:
        """Whether all nodes are there, and no lease, reservation, order or resting slot is left."""
        try:
            status = self.client.status()
        except kvpool.UnavailableError:
            return False
        open_ends = ("reservations", "leases", "orders_pending", "copies")
        ready = [node.state for node in status.nodes].count("ready")
        return (
            ready == NODES
            and not status.recovery.active
            and not any(status.counters[name] for name in open_ends)
            and not any(self.stat(name).quarantined_bytes for name in self.nodes)
        )

    def counts_agree(self) -> bool:
        """Directory and nodes count the same; they are asked one after the other."""
        nodes = {node.node_id: (node.blocks, node.used_bytes) for node in self.client.status().nodes}
        stats = {name: self.stat(name).node.segments[0] for name in self.nodes}
        held = {name: (len(slots), len(slots) * BLOCK_BYTES) for name, slots in self.headers().items()}
        return nodes == held == {name: (segment.blocks, segment.used_bytes) for name, segment in stats.items()}

    def agree(self) -> None:
        """The directory names exactly the slots that the nodes hold."""
        eventually(self.counts_agree)
        held = self.headers()
        parents = {h: parent for slots in held.values() for h, parent, *_ in slots}
        for leaf in set(parents) - set(parents.values()):
            chain = [leaf]
            while (parent := parents[chain[0]]) != ROOT_PARENT and parent in parents:
                chain.insert(0, parent)
            if parents[chain[0]] == ROOT_PARENT:
                assert self.located(chain) == {row for slots in held.values() for row in slots if row[0] in chain}

    def fill(self) -> None:
        """No memory is held by anybody: other blocks can take the place of all of it."""

        def filled() -> bool:
            chain = random_chain(BLOCKS)
            return self.put(chain, timeout_s=5.0).stored == BLOCKS

        eventually(filled)

    def churn(self) -> None:
        """Most memory is given to other blocks, twice."""
        for _ in range(4):
            self.put_again(random_chain(BLOCKS // 2))

    def headers(self) -> dict[str, set[tuple[bytes, bytes, int, int]]]:
        """(hash, parent, page, generation) of what each node holds, as its header file says."""
        found = {}
        for name in self.nodes:
            records = np.fromfile(self.directory / f"kvpool-{name}.headers", RECORD, offset=PROLOGUE_BYTES)
            pages = np.flatnonzero(records["state"] == SlotState.COMMITTED).tolist()
            rows = [records[page] for page in pages]
            found[name] = {
                (row["hash"].tobytes(), row["parent"].tobytes(), page, int(row["generation"]))
                for page, row in zip(pages, rows, strict=True)
            }
        return found

    def located(self, chain: list[bytes]) -> set[tuple[bytes, bytes, int, int]]:
        """The same rows, as the directory says of the blocks of a chain."""
        request = LocateRequest(NAMESPACE.id, b"".join(chain), 0, 0, 0)
        reply = self.keyspace._call(request, LocateReply, Deadline(5.0))
        count = len(reply.slots) // 4
        blocks, slots = (unpack(n, getattr(reply, n), "<u4", count).tolist() for n in ("blocks", "slots"))
        generations = unpack("generations", reply.generations, "<u8", count).tolist()
        above = [ROOT_PARENT, *chain]
        return {(chain[b], above[b], s, g) for b, s, g in zip(blocks, slots, generations, strict=True)}

    def stat(self, name: str) -> store_node_pb2.StatResponse:
        with grpc.insecure_channel(self.ready[name]["grpc"].removeprefix("grpc://")) as channel:
            return store_node_pb2_grpc.StoreNodeStub(channel).Stat(store_node_pb2.StatRequest(), timeout=5)


class FaultPools:
    """One pool after the other: a test gets that of the one before it, unless that has failed."""

    def __init__(self, new_directory: Callable[[], Path]) -> None:
        self._new_directory = new_directory
        self._pool: FaultPool | None = None

    def take(self) -> FaultPool:
        if self._pool is None or not self._pool.is_settled:
            self.close()
            self._pool = FaultPool(self._new_directory(), ExitStack())
            self._pool.start()
        self._pool.is_settled = False
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stack.close()


def give_up_a_block(pool: FaultPool, chain: list[bytes]) -> None:
    """A reader says that the last block of a chain is bad: its node is ordered to free the slot."""
    [(block, _, slot, generation)] = [row for row in pool.located(chain) if row[0] == chain[-1]]
    [segment] = next(node for node in pool.client.status().nodes if node.node_id == "n0").segments
    bad = ReportBadRequest(NAMESPACE.id, block, bytes.fromhex(segment.segment_id), slot, generation)
    pool.client._meta.call(bad, Done, Deadline(5.0), again=False)


def rejoin(pool: FaultPool, name: str) -> None:
    """Let a node be lost, and come back with an inventory."""
    pool.signal(pool.nodes[name], signal.SIGSTOP)
    try:
        eventually(lambda: pool.state_of(name) == "lost")
    finally:
        pool.signal(pool.nodes[name], signal.SIGCONT)
