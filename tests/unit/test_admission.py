"""Admission: so many at a time; the next one is refused at once, by name, on each of the service's doors."""

import threading

import grpc
import pytest
from framed_peer import LONG_S
from waiting import eventually

import kvpool
from kvpool.core.errors import OverloadedError
from kvpool.meta import MetaServer
from kvpool.ops.admission import Admission
from kvpool.ops.grpc_server import CALLS_MAX
from kvpool.ops.settings import MetaSettings
from kvpool.transport.wire.messages import PROTOCOL_VERSION
from kvpool.v1 import admin_pb2, admin_pb2_grpc, membership_pb2, membership_pb2_grpc

NAMESPACE = kvpool.Namespace(model="crowded", block_tokens=1, block_bytes=64)
CHAIN = kvpool.chain_hashes(range(3), 1)


def test_the_limit_is_for_those_inside():
    admission = Admission("things", 2)
    with admission, admission, pytest.raises(OverloadedError, match="2 things at a time is the limit here; try again"):
        admission.__enter__()
    with admission:
        pass
    assert admission.refused == 1


def test_those_who_wait_for_the_lock_are_inside():
    lock = threading.Lock()
    admission = Admission("things", 1, lock)

    def enter():
        with admission:
            pass

    waiting = threading.Thread(target=enter)
    with lock:
        waiting.start()
        eventually(lambda: admission._inside == 1)
        with pytest.raises(OverloadedError):
            admission.__enter__()
    waiting.join()
    with admission:
        assert lock.locked()


def test_what_fails_inside_leaves_too():
    admission = Admission("things", 1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), admission:
            raise ZeroDivisionError


@pytest.fixture
def server():
    server = MetaServer(MetaSettings(grpc_port=0, framed_port=0, requests_max=1, nodes_max=1, connections_max=2))
    server.start()
    yield server
    server.stop()


def counters(server):
    with grpc.insecure_channel(server.grpc_address) as channel:
        return admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=LONG_S).counters


def test_a_full_service_is_a_miss_that_says_so_and_finishes_what_it_began(server):
    with kvpool.connect(server.uri, timeout_s=LONG_S) as client:
        keyspace = client.namespace(NAMESPACE)
        reservation = keyspace.reserve(CHAIN)
        with server.service._lock:
            held = threading.Thread(target=keyspace.match, args=[CHAIN])
            held.start()
            eventually(lambda: server.service.requests._inside == 1)
            matched = keyspace.match(CHAIN)
            stored = keyspace.store(CHAIN, [bytearray(64)] * 3)
            loaded = keyspace.load(CHAIN, [bytearray(64)] * 3)
        held.join()

        assert matched == kvpool.Match(0, kvpool.MissReason.OVERLOADED, asked=False)
        assert set(loaded.reasons) == {kvpool.MissReason.OVERLOADED}
        assert stored.refused == 3
        assert (client.stats().overloaded, client.stats().retries) == (3, 0)
        assert counters(server)["refused_requests"] == 3
        assert keyspace.match(CHAIN).asked, "the breaker stayed closed: a full service is no dead one"
        server.service.requests._inside = 1
        keyspace.abort(reservation)
        server.service.requests._inside = 0
        assert counters(server)["reservations"] == 0, "what ends something begun is always let in"


def test_connections_over_the_limit_are_told_why(server):
    first = kvpool.connect(server.uri, timeout_s=LONG_S)
    second = kvpool.connect(server.uri, timeout_s=LONG_S)
    with first, second, pytest.raises(kvpool.OverloadedError, match="meta serves 2 connections already; try again"):
        kvpool.connect(server.uri, timeout_s=LONG_S)
    assert server._framed.refused_connections == 1
    eventually(lambda: not server._framed.connections)
    with kvpool.connect(server.uri, timeout_s=LONG_S):
        pass


def hello(node_id):
    return membership_pb2.FromNode(
        hello=membership_pb2.NodeHello(node_id=node_id, incarnation=1, protocol=PROTOCOL_VERSION)
    )


def control(channel, node_id, until):
    def outgoing():
        yield hello(node_id)
        until.wait(LONG_S)

    return membership_pb2_grpc.MembershipStub(channel).Control(outgoing())


def test_nodes_over_the_limit_are_refused_and_clients_are_not(server):
    until = threading.Event()
    with grpc.insecure_channel(server.grpc_address) as channel:
        first = control(channel, "n0", until)
        assert next(first).WhichOneof("instruction") == "welcome"
        with pytest.raises(grpc.RpcError) as refused:
            next(control(channel, "n1", until))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert counters(server)["refused_nodes"] == 1
        until.set()
        first.cancel()
    eventually(lambda: server._membership.nodes._inside == 0)


def test_grpc_calls_over_the_limit_are_refused_by_name(server):
    calls = server._grpc.calls
    calls._inside = CALLS_MAX
    with pytest.raises(kvpool.OverloadedError, match="128 calls at a time"):
        kvpool.connect(server.uri, timeout_s=LONG_S)
    calls._inside = 0
    assert counters(server)["refused_calls"] == 1
