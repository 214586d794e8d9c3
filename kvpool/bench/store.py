"""Stores: how many index entries a second the metadata service takes, and how soon a stored block is seen elsewhere.

The index alone: reserve and commit over the framed protocol, from a member of the pool that has no bytes. End to end:
small blocks through a real node. Visible: from the start of a put until another process's look-up finds the block,
both on CLOCK_MONOTONIC, which processes share.
"""

import itertools
import os
import queue
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import grpc
import msgspec
import numpy as np

import kvpool
from kvpool.bench.limits import blocks_of, shared_memory
from kvpool.bench.measure import PoolProcesses, at_least, child, heard, percentile, pool_processes, rounded, say, settle
from kvpool.core.directory import CommitStatus, Want
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, SEGMENT_ID_BYTES
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.ops.grpc_server import CHANNEL_OPTIONS, raised_by
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import PROTOCOL_VERSION, CommitRequest, Statuses, pack
from kvpool.v1 import common_pb2, membership_pb2, membership_pb2_grpc

BATCH_BLOCKS = 256
VISIBLE_BYTES = 2 << 20
TARGET_BLOCKS_PER_S = 100_000
TARGET_VISIBLE_MS = 0.8

CALL_TIMEOUT_S = 30.0
VISIBLE_TIMEOUT_S = 10.0
"""How long a watcher looks for a block before it gives up."""

_MEMBER_BYTES = 1 << 46
"""What the member without bytes says it has: nothing is ever evicted."""


class StoreRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="store"):
    """One measurement.

    Attributes:
        blocks_per_s: Entries reserved and committed, one caller, batches of `BATCH_BLOCKS`; of the median round.
        visible_ms: Median from the start of a 2 MiB put until another process finds it.
        end_to_end_blocks_per_s: Blocks of 4 KiB stored through a real node, same batches.
    """

    blocks_per_s: float
    visible_ms: float
    end_to_end_blocks_per_s: float


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: blocks a round, rounds, and puts that are timed until they are visible."""

    blocks: int = 16_384
    rounds: int = 5
    samples: int = 100

    def __post_init__(self) -> None:
        for name in ("blocks", "rounds", "samples"):
            at_least(name, getattr(self, name))

    @property
    def batches(self) -> int:
        """Batches of a round."""
        return -(-self.blocks // BATCH_BLOCKS)


def measure_store(settings: StoreSettings) -> StoreRow:
    """Run all three; raises KvpoolError when a pool did not start or did not take every block."""
    index_s = _index_round_s(settings)
    small = Namespace(model="kvpool-bench", block_tokens=16, block_bytes=PAGE_BYTES)
    large = Namespace(model="kvpool-bench", block_tokens=16, block_bytes=VISIBLE_BYTES)
    small_bytes = settings.batches * BATCH_BLOCKS * PAGE_BYTES * (settings.rounds + 1)
    node_bytes = small_bytes + (settings.samples + 1) * VISIBLE_BYTES
    with pool_processes(node_bytes) as pool, kvpool.connect(pool.uri, transports=("shm",)) as client:
        visible_s = _visible_s(client.namespace(large), pool, settings.samples)
        end_to_end_s = _end_to_end_round_s(client.namespace(small), settings)
    blocks = settings.batches * BATCH_BLOCKS
    return StoreRow(
        blocks_per_s=rounded(blocks / index_s),
        visible_ms=rounded(visible_s * 1e3),
        end_to_end_blocks_per_s=rounded(blocks / end_to_end_s),
    )


class IndexMember:
    """A node as the metadata service sees one, without bytes: it joins, and commits whatever was reserved.

    Args:
        uri: The pool.
        framed: Address of its framed protocol.

    Raises:
        UnavailableError: The service did not take it in.
    """

    def __init__(self, uri: str, framed: str) -> None:
        self._connection = Connection(framed, "node:bench-index", CALL_TIMEOUT_S)
        self._channel = grpc.insecure_channel(uri.removeprefix("grpc://"), options=CHANNEL_OPTIONS)
        self._segment_id = os.urandom(SEGMENT_ID_BYTES)
        self._numbers = itertools.count(1)
        self._events: queue.SimpleQueue[membership_pb2.FromNode | None] = queue.SimpleQueue()
        self._session = self._join()

    def commit(self, reservation: kvpool.Reservation) -> None:
        """Commit all blocks of a reservation; raises KvpoolError when the service does not take them all."""
        count = len(reservation.hashes) // HASH_BYTES
        numbers = np.fromiter(itertools.islice(self._numbers, count), np.uint64, count)
        request = CommitRequest(
            session=self._session,
            segment_id=self._segment_id,
            reservation=reservation.number,
            hashes=reservation.hashes,
            shards=bytes(2 * count),
            slots=pack(numbers, "<u4"),
            generations=pack(numbers, "<u8"),
            checksums=pack(numbers, "<u8"),
        )
        statuses = self._connection.call(request, Statuses, CALL_TIMEOUT_S).statuses
        if statuses.count(CommitStatus.COMMITTED) != count:
            raise KvpoolError(f"only {statuses.count(CommitStatus.COMMITTED)} of {count} blocks were committed")

    def leave(self) -> None:
        """Leave the pool."""
        self._events.put(None)
        self._channel.close()
        self._connection.close()

    def _join(self) -> int:
        segment = common_pb2.Segment(segment_id=self._segment_id, medium="none", capacity_bytes=_MEMBER_BYTES)
        hello = membership_pb2.NodeHello(
            node_id="bench-index", incarnation=1, segments=[segment], protocol=PROTOCOL_VERSION
        )
        self._events.put(membership_pb2.FromNode(hello=hello))
        self._events.put(membership_pb2.FromNode(inventory_done=membership_pb2.InventoryDone()))
        # Kept: gRPC cancels a call that nobody holds any more.
        self._call = membership_pb2_grpc.MembershipStub(self._channel).Control(iter(self._events.get, None))
        session = 0
        try:
            for message in self._call:
                if message.HasField("welcome"):
                    session = message.welcome.session
                elif message.HasField("ready"):
                    return session
        except grpc.RpcError as error:
            raise raised_by(error) from error
        raise UnavailableError("the metadata service ended the control stream before it took the member in")


def _index_round_s(settings: StoreSettings) -> float:
    """Median seconds to reserve and commit a round's entries."""
    # The member sends no heartbeats: it must not be lost while it works.
    with ExitStack() as stack:
        pool = stack.enter_context(pool_processes(None, node_ttl="1h"))
        member = IndexMember(pool.uri, pool.framed)
        stack.callback(member.leave)
        client = stack.enter_context(kvpool.connect(pool.uri))
        keyspace = client.namespace(Namespace(model="kvpool-bench", block_tokens=16, block_bytes=PAGE_BYTES))

        def put(chain: bytes) -> None:
            reservation = keyspace.reserve(chain)
            if reservation.wants.count(Want.WANTED) != BATCH_BLOCKS:
                raise KvpoolError("the metadata service did not want every block")
            member.commit(reservation)

        return _median_round_s(put, settings)


def _end_to_end_round_s(keyspace: kvpool.Keyspace, settings: StoreSettings) -> float:
    """Median seconds to store a round's blocks through the node."""
    buffers = blocks_of(shared_memory(BATCH_BLOCKS * PAGE_BYTES), PAGE_BYTES)

    def put(chain: bytes) -> None:
        stored = keyspace.store(chain, buffers).stored
        if stored != BATCH_BLOCKS:
            raise KvpoolError(f"only {stored} of {BATCH_BLOCKS} blocks were stored")

    return _median_round_s(put, settings)


def _median_round_s(put: Callable[[bytes], None], settings: StoreSettings) -> float:
    """Seconds of the median round of batches, each a chain of its own; a first round warms up."""
    rounds_s = []
    for _ in range(settings.rounds + 1):
        chains = [os.urandom(BATCH_BLOCKS * HASH_BYTES) for _ in range(settings.batches)]
        began_s = time.perf_counter()
        for chain in chains:
            put(chain)
        rounds_s.append(time.perf_counter() - began_s)
    return percentile(rounds_s[1:], 50)


def _visible_s(keyspace: kvpool.Keyspace, pool: PoolProcesses, samples: int) -> float:
    """Median seconds from the start of a put until the watcher's look-up finds it."""
    buffers = blocks_of(shared_memory(min(samples, 64) * VISIBLE_BYTES), VISIBLE_BYTES)
    times_s = []
    keyspace.store(os.urandom(HASH_BYTES), buffers[:1])  # maps the node's memory
    settle((os.getpid(), *pool.pids))
    with child(report_visible, pool.uri, keyspace.namespace.document) as watcher:
        assert watcher.stdin is not None
        for i in range(samples):
            block_hash = os.urandom(HASH_BYTES)
            watcher.stdin.write(f"{block_hash.hex()}\n")
            watcher.stdin.flush()
            heard(watcher)  # it is looking
            began_ns = time.monotonic_ns()
            keyspace.store(block_hash, [buffers[i % len(buffers)]])
            times_s.append((int(heard(watcher)) - began_ns) / 1e9)
    return percentile(times_s, 50)


def report_visible(uri: str, document: bytes) -> None:
    """In a child: for each hash on stdin look until the pool holds it, and say when that was, in nanoseconds."""
    with kvpool.connect(uri) as client:
        keyspace = client.namespace(parse_namespace(document))
        for line in sys.stdin:
            block_hash = bytes.fromhex(line)
            give_up_s = time.monotonic() + VISIBLE_TIMEOUT_S
            keyspace.match(block_hash)
            say("looking")
            while not keyspace.match(block_hash).blocks:
                if time.monotonic() > give_up_s:
                    raise UnavailableError(f"the block did not become visible in {VISIBLE_TIMEOUT_S:g} s")
            say(time.monotonic_ns())
