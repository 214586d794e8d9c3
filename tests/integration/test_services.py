"""The gRPC faces of both services: the same operations as the framed protocol, health, limits."""

import socket

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvpool
from kvpool.ops.grpc_server import raised_by
from kvpool.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    directory_pb2,
    directory_pb2_grpc,
    store_node_pb2,
    store_node_pb2_grpc,
)
from tests.integration.conftest import BLOCK_BYTES, random_chain

NAMESPACE = kvpool.Namespace(model="grpc", block_tokens=16, block_bytes=BLOCK_BYTES)


@pytest.fixture
def meta_channel(embedded):
    with grpc.insecure_channel(embedded.meta.grpc_address) as channel:
        yield channel


@pytest.fixture
def node_channel(embedded):
    with grpc.insecure_channel(embedded.nodes[0].grpc_address) as channel:
        yield channel


def test_a_block_is_written_and_found_over_grpc_alone(embedded, meta_channel, node_channel):
    directory = directory_pb2_grpc.DirectoryStub(meta_channel)
    node = store_node_pb2_grpc.StoreNodeStub(node_channel)
    (block_hash,) = random_chain(1)
    opened = directory.OpenNamespace(directory_pb2.OpenNamespaceRequest(document=NAMESPACE.document), timeout=5)

    reserved = directory.Reserve(directory_pb2.ReserveRequest(namespace=opened.namespace, hashes=block_hash), timeout=5)
    prepared = node.Prepare(store_node_pb2.PrepareRequest(grant=reserved.grants[0].grant, writer=7), timeout=5)
    segment = embedded.nodes[0].store.segment
    sealed = node.Commit(
        store_node_pb2.CommitSlotsRequest(
            writer=7,
            segment_id=segment.segment_id,
            reservation=reserved.reservation,
            slot=prepared.slot,
            generation=prepared.generation,
            checksum=[42],
        ),
        timeout=5,
    )
    matched = directory.Match(directory_pb2.MatchRequest(namespace=opened.namespace, hashes=block_hash), timeout=5)
    located = directory.Locate(directory_pb2.LocateRequest(namespace=opened.namespace, hashes=block_hash), timeout=5)

    assert opened.namespace == NAMESPACE.id
    assert sealed.statuses == b"\x00"
    assert matched.blocks == 1
    assert (located.slot, located.generation, located.checksum) == (prepared.slot, prepared.generation, [42])


def test_another_writer_cannot_commit_or_abort_a_prepared_slot(embedded, meta_channel, node_channel):
    directory = directory_pb2_grpc.DirectoryStub(meta_channel)
    node = store_node_pb2_grpc.StoreNodeStub(node_channel)
    (block_hash,) = random_chain(1)
    directory.OpenNamespace(directory_pb2.OpenNamespaceRequest(document=NAMESPACE.document), timeout=5)
    reserved = directory.Reserve(directory_pb2.ReserveRequest(namespace=NAMESPACE.id, hashes=block_hash), timeout=5)
    prepared = node.Prepare(store_node_pb2.PrepareRequest(grant=reserved.grants[0].grant, writer=7), timeout=5)
    request = store_node_pb2.CommitSlotsRequest(
        segment_id=embedded.nodes[0].store.segment.segment_id,
        reservation=reserved.reservation,
        slot=prepared.slot,
        generation=prepared.generation,
        checksum=[1],
    )

    request.writer = 8
    stranger = node.Commit(request, timeout=5)
    node.Abort(store_node_pb2.AbortSlotsRequest(writer=8), timeout=5)
    request.writer = 7
    owner = node.Commit(request, timeout=5)

    assert (stranger.statuses, owner.statuses) == (b"\x01", b"\x00")


def test_a_forged_grant_opens_nothing(node_channel, meta_channel):
    directory = directory_pb2_grpc.DirectoryStub(meta_channel)
    node = store_node_pb2_grpc.StoreNodeStub(node_channel)
    directory.OpenNamespace(directory_pb2.OpenNamespaceRequest(document=NAMESPACE.document), timeout=5)
    reserved = directory.Reserve(
        directory_pb2.ReserveRequest(namespace=NAMESPACE.id, hashes=random_chain(1)[0]), timeout=5
    )
    grant = bytearray(reserved.grants[0].grant)
    grant[40] ^= 1

    with pytest.raises(grpc.RpcError) as refused:
        node.Prepare(store_node_pb2.PrepareRequest(grant=bytes(grant), writer=1), timeout=5)

    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not of this node's current session" in refused.value.details()


def test_pins_and_explanations(embedded, meta_channel):
    admin = admin_pb2_grpc.AdminStub(meta_channel)
    chain = random_chain(2)
    with embedded.connect() as client:
        client.namespace(NAMESPACE).store(chain, [np.zeros(BLOCK_BYTES, np.uint8)] * 2)
    pin = admin_pb2.PinRequest(namespace=NAMESPACE.id, hash=chain[1])

    assert admin.Pin(pin, timeout=5).pinned
    assert admin.Unpin(admin_pb2.UnpinRequest(namespace=NAMESPACE.id, hash=chain[1]), timeout=5).unpinned
    assert not admin.Unpin(admin_pb2.UnpinRequest(namespace=NAMESPACE.id, hash=chain[1]), timeout=5).unpinned
    known, unknown = (
        admin.Explain(admin_pb2.ExplainRequest(namespace=NAMESPACE.id, hashes=h), timeout=5).blocks[0].reason
        for h in (chain[0], random_chain(1)[0])
    )
    assert (known, unknown) == ("", "cold")


def test_a_call_without_a_deadline_is_refused(meta_channel):
    directory = directory_pb2_grpc.DirectoryStub(meta_channel)
    with pytest.raises(grpc.RpcError) as refused:
        directory.GetPool(directory_pb2.GetPoolRequest())
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "needs a deadline" in refused.value.details()


def test_errors_cross_grpc_as_what_they_are(meta_channel):
    directory = directory_pb2_grpc.DirectoryStub(meta_channel)
    cases = [
        (directory.OpenNamespace, directory_pb2.OpenNamespaceRequest(document=b"{"), kvpool.InvalidNamespaceError),
        (
            directory.Match,
            directory_pb2.MatchRequest(namespace=bytes(32), hashes=bytes(32)),
            kvpool.UnknownNamespaceError,
        ),
        (directory.Match, directory_pb2.MatchRequest(namespace=bytes(31), hashes=bytes(32)), kvpool.InvalidHashError),
        (directory.Match, directory_pb2.MatchRequest(namespace=bytes(32), hashes=bytes(31)), kvpool.InvalidHashError),
    ]
    for method, request, expected in cases:
        with pytest.raises(grpc.RpcError) as failed:
            method(request, timeout=5)
        assert type(raised_by(failed.value)) is expected


def test_health_follows_each_service(meta_channel, node_channel):
    for channel, service in ((meta_channel, "kvpool.v1.Directory"), (node_channel, "kvpool.v1.StoreNode")):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", service):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_drained_node_serves_reads_and_takes_no_new_block(embedded, node_channel):
    chain = random_chain(1)
    with embedded.connect() as client:
        keyspace = client.namespace(NAMESPACE)
        keyspace.store(chain, [np.ones(BLOCK_BYTES, np.uint8)])
        store_node_pb2_grpc.StoreNodeStub(node_channel).Drain(store_node_pb2.DrainRequest(), timeout=5)
        loaded = np.zeros(BLOCK_BYTES, np.uint8)

        refused = keyspace.store(random_chain(1), [np.ones(BLOCK_BYTES, np.uint8)])

        assert refused.refused == 1
        assert keyspace.load(chain, [loaded]).loaded == 1
        assert loaded.all()


def test_a_node_tells_its_use_over_grpc(embedded, node_channel):
    with embedded.connect() as client:
        client.namespace(NAMESPACE).store(random_chain(3), [np.ones(BLOCK_BYTES, np.uint8)] * 3)

    stat = store_node_pb2_grpc.StoreNodeStub(node_channel).Stat(store_node_pb2.StatRequest(), timeout=5)

    assert stat.node.node_id == "e0"
    assert stat.node.segments[0].used_bytes == 3 * BLOCK_BYTES
    assert stat.counters["committed"] == 3


def test_everything_listens_on_loopback_only(embedded):
    addresses = [embedded.meta.grpc_address, embedded.meta.framed_address]
    addresses += [embedded.nodes[0].grpc_address, embedded.nodes[0].data_address]
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    with socket.socket(socket.AF_INET) as outside:
        # The host's other loopback address reaches nothing that is bound to 127.0.0.1 alone.
        assert outside.connect_ex(("127.0.0.2", int(addresses[1].rpartition(":")[2]))) != 0
