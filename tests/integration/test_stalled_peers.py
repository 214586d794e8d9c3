"""Peers that stop in the middle of something slow nobody else, and what they hold is theirs up to their deadlines."""

import signal
import socket
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np
import pytest

import kvpool
from kvpool.testing import FaultProxy, Faults
from kvpool.transport.wire.connection import split_address
from kvpool.transport.wire.framed import FramedSocket
from kvpool.transport.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    LocateReply,
    LocateRequest,
    PrepareReply,
    PrepareRequest,
    ReadRequest,
    Welcome,
    WriteRequest,
)
from kvpool.v1 import store_node_pb2, store_node_pb2_grpc
from tests.framed_peer import frame
from tests.integration.conftest import BLOCK_BYTES, Pool, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually

STALLED_BLOCKS = 256
"""16 MiB: more than a socket's buffers hold."""

STALLED = 8
PEER_DEADLINE_MS = 500


class RawPeer:
    """A connection in the hands of the test: it sends what it is told to, and reads nothing by itself."""

    def __init__(self, address: str) -> None:
        self.framed = FramedSocket(socket.create_connection(split_address(address.removeprefix("tcp://")), 20))
        self.framed.sock.settimeout(20)
        assert isinstance(self.ask(Hello(PROTOCOL_VERSION, "raw")), Welcome)

    def ask(self, request):
        self.framed.send(request, 1, PEER_DEADLINE_MS)
        return self.framed.receive_body(self.framed.receive_header())

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.framed.close()


def node_address(pool: Pool, name: str = "n0") -> str:
    return pool.ready[name]["data"]


def all_work(pool: Pool, rng, client: kvpool.Client) -> None:
    """What another client does: every block is stored, found and loaded, right."""
    keyspace = open_blocks(client)
    for _ in range(20):
        chain, blocks, loaded = random_chain(8), random_blocks(rng, 8), blank(8)
        assert keyspace.store(chain, list(blocks)).stored == 8
        assert keyspace.match(chain).blocks == 8
        assert keyspace.load(chain, list(loaded)).loaded == 8
        np.testing.assert_array_equal(blocks, loaded)
    assert client.stats().retries == 0


def node_stat(pool: Pool, name: str = "n0") -> store_node_pb2.StatResponse:
    with grpc.insecure_channel(pool.ready[name]["grpc"].removeprefix("grpc://")) as channel:
        return store_node_pb2_grpc.StoreNodeStub(channel).Stat(store_node_pb2.StatRequest(), timeout=20)


@contextmanager
def stalled_readers(pool: Pool, rng):
    """Each has asked for more than fits its socket, and reads none of it."""
    client = pool.connect("tcp")
    keyspace, chain = open_blocks(client), random_chain(STALLED_BLOCKS)
    assert keyspace.store(chain, list(random_blocks(rng, STALLED_BLOCKS))).stored == STALLED_BLOCKS
    located = client._meta.call(
        LocateRequest(keyspace.namespace.id, b"".join(chain), 0, 0, 0), LocateReply, client._deadline(20), again=False
    )
    _, segment = client._nodes.find(int.from_bytes(located.segments[:2], "little"), client._meta.topology)
    request = ReadRequest(segment.segment_id, located.slots, located.generations, BLOCK_BYTES)
    with ExitStack() as stack:
        for _ in range(STALLED):
            stack.enter_context(RawPeer(node_address(pool))).framed.send(request, 2, PEER_DEADLINE_MS)
        yield
        # Their deadline passes, and what they hold pinned is let go: the blocks can leave at once.
        eventually(lambda: node_stat(pool).connections <= 4)


@contextmanager
def stalled_writers(pool: Pool, rng):
    """Each has prepared its slots and sent half of its bytes."""
    keyspace = open_blocks(pool.connect("tcp"))
    with ExitStack() as stack:
        for _ in range(STALLED):
            reservation = keyspace.reserve(random_chain(2))
            (grant,) = reservation.grants
            peer = stack.enter_context(RawPeer(node_address(pool)))
            prepared = peer.ask(PrepareRequest(grant.grant))
            assert isinstance(prepared, PrepareReply)
            _, segment = keyspace._client._nodes.find(grant.segment, keyspace._client._meta.topology)
            where = (prepared.slots, prepared.generations, bytes(16))
            write = WriteRequest(segment.segment_id, reservation.number, *where)
            whole = frame(write, 2, bytes(2 * BLOCK_BYTES), deadline_ms=PEER_DEADLINE_MS)
            peer.framed.sock.sendall(whole[: len(whole) // 2])
        before = node_stat(pool)
        yield
        assert before.node.segments[0].blocks >= 2 * STALLED  # they held slots meanwhile
        eventually(lambda: node_stat(pool).connections <= 4)


@contextmanager
def half_frames(pool: Pool, rng):
    """To both services, half a header, and a header without its body."""
    with ExitStack() as stack:
        for address in (node_address(pool), pool.meta_ready["framed"]):
            for size in (5, 40) * STALLED:
                peer = stack.enter_context(RawPeer(address))
                peer.framed.sock.sendall(frame(Hello(PROTOCOL_VERSION, "x" * 64), 2)[:size])
        yield


@contextmanager
def idle_connections(pool: Pool, rng):
    """200 that have greeted and ask for nothing."""
    with ExitStack() as stack:
        for address in (node_address(pool), pool.meta_ready["framed"]):
            for _ in range(100):
                stack.enter_context(RawPeer(address))
        yield


@contextmanager
def silent_way(pool: Pool, rng):
    """A client whose way to the service is a proxy that accepts and passes nothing on."""
    with FaultProxy(*split_address(pool.uri.removeprefix("grpc://"))) as proxy:
        proxy.suffer(to_server=Faults(stalled=True), to_client=Faults(stalled=True))
        with pytest.raises(kvpool.UnavailableError):
            kvpool.connect(f"grpc://{proxy.address}", timeout_s=0.5)
        yield


@pytest.mark.parametrize("peers", [stalled_readers, stalled_writers, half_frames, idle_connections, silent_way])
def test_others_go_on_beside(start_pool, rng, peers):
    pool = start_pool(nodes=1, size="128MiB")
    others = pool.connect("tcp")
    with peers(pool, rng):
        all_work(pool, rng, others)
    eventually(lambda: node_stat(pool).quarantined_bytes == 0)


@contextmanager
def behind_a_proxy(pool: Pool, name: str):
    """A further node, which clients reach through a proxy at another address of this host."""
    pool.start_node(name, "8MiB", **{"advertise-host": "127.0.0.2"})
    port = int(node_address(pool, name).rpartition(":")[2])
    with FaultProxy("127.0.0.1", port, "127.0.0.2", port) as proxy:
        yield proxy


def stored_on(client: kvpool.Client, keyspace: kvpool.Keyspace, chain: list[bytes]) -> set[str]:
    """The nodes that hold a chain."""
    request = LocateRequest(keyspace.namespace.id, b"".join(chain), 0, 0, 0)
    located = client._meta.call(request, LocateReply, client._deadline(20), again=False)
    numbers = np.frombuffer(located.segments, "<u2").tolist()
    return {client._nodes.find(number, client._meta.topology)[0].node_id for number in numbers}


def test_a_node_that_never_answers_is_left_alone_and_the_others_are_not(start_pool, rng):
    pool = start_pool(nodes=1, size="8MiB", **{"replicas-max": 1})
    with behind_a_proxy(pool, "n1") as proxy:
        client = pool.connect("tcp")
        keyspace = open_blocks(client)
        places: dict[str, list[bytes]] = {}
        while len(places) < 2:
            chain = random_chain(1)
            assert keyspace.store(chain, list(random_blocks(rng, 1))).stored == 1
            places[stored_on(client, keyspace, chain).pop()] = chain

        proxy.suffer(to_server=Faults(stalled=True), to_client=Faults(stalled=True))
        reasons = [keyspace.load(places["n1"], list(blank(1)), timeout_s=0.3).reasons[0] for _ in range(3)]
        assert reasons == [kvpool.MissReason.OVER_DEADLINE] * 3
        # Now its circuit is open: calls cost nothing, whatever time they have.
        assert keyspace.load(places["n1"], list(blank(1))).reasons == (kvpool.MissReason.NODE_DOWN,)
        assert keyspace.load(places["n0"], list(blank(1))).loaded == 1
        assert {node.node_id: node.state for node in client.status().nodes} == {"n0": "ready", "n1": "ready"}

        proxy.suffer()
        eventually(lambda: keyspace.load(places["n1"], list(blank(1))).loaded == 1)


@pytest.mark.parametrize(
    "faults", [Faults(latency_s=0.02), Faults(slice_bytes=1_500), Faults(bytes_per_s=4e6), Faults(limit_bytes=100_000)]
)
def test_a_bad_way_to_a_node_brings_right_bytes_or_misses(start_pool, rng, faults):
    pool = start_pool(nodes=0)
    with behind_a_proxy(pool, "n1") as proxy:
        client = pool.connect("tcp")
        keyspace, chain, blocks = open_blocks(client), random_chain(8), random_blocks(rng, 8)
        assert keyspace.store(chain, list(blocks)).stored == 8
        proxy.suffer(to_server=faults, to_client=faults)
        proxy.reset()

        loaded = blank(8)
        result = keyspace.load(chain, list(loaded), timeout_s=20)
        right = [i for i, reason in enumerate(result.reasons) if reason is None]
        np.testing.assert_array_equal(loaded[right], blocks[right])
        if faults.limit_bytes is None:
            eventually(lambda: keyspace.load(chain, list(loaded), timeout_s=20).loaded == 8)
        proxy.suffer()
        eventually(lambda: keyspace.load(chain, list(loaded)).loaded == 8)
        np.testing.assert_array_equal(loaded, blocks)
        assert client.stats().verify_failures == 0


def test_a_frozen_node_gets_no_more_blocks_and_no_more_orders_than_it_had(start_pool, rng):
    """It looks empty, since what is evicted there makes room, and its control stream is not read."""
    pool = start_pool(nodes=2, size="2MiB", **{"node-ttl": "15s", "replicas-max": 1})
    client = pool.connect("tcp")
    keyspace = open_blocks(client)

    def store(times: int) -> int:
        blocks = [list(random_blocks(rng, 1)) for _ in range(times)]
        return sum(keyspace.store(random_chain(1), block, timeout_s=1).stored for block in blocks)

    def state(name: str) -> str:
        return next(node.state for node in client.status().nodes if node.node_id == name)

    assert store(100) == 100
    held_blocks = sum(node.blocks for node in client.status().nodes)
    pool.signal(pool.nodes["n1"], signal.SIGSTOP)
    try:
        eventually(lambda: store(20) == 20)
        assert state("n1") == "ready", "long before it counts as lost"
        assert 0 < client.status().counters["orders_pending"] <= held_blocks
    finally:
        pool.signal(pool.nodes["n1"], signal.SIGCONT)
    eventually(lambda: client.status().counters["orders_pending"] == 0)
    eventually(lambda: store(20) == 20 and state("n1") == "ready")
