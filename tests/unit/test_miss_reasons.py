"""What a client says of a metadata service that does not answer: a miss, and why."""

import time

import numpy as np
import pytest
from framed_peer import LONG_S, SOON_S
from scripted_server import WELCOME_OF_SERVER, on_tcp, running

import kvpool
from kvpool.meta.service import MetaService
from kvpool.meta.servicers import DirectoryServicer
from kvpool.ops.grpc_server import GrpcServer
from kvpool.ops.settings import MetaSettings
from kvpool.v1 import directory_pb2_grpc

NAMESPACE = kvpool.Namespace(model="unanswered", block_tokens=1, block_bytes=64)
CHAIN = kvpool.chain_hashes(range(3), 1)


@pytest.fixture
def framed():
    """A framed server that never answers what the directory is asked, and its URI."""
    with running(on_tcp) as served:
        yield served


@pytest.fixture
def client(framed):
    """A client of a metadata service whose hot calls go to that server."""
    _, uri = framed
    incarnation = WELCOME_OF_SERVER.incarnation
    service = MetaService(MetaSettings(), time.monotonic, lambda count: (incarnation << 1).to_bytes(count, "little"))
    directory = DirectoryServicer(service, [uri], "scripted")
    server = GrpcServer([], lambda grpc: directory_pb2_grpc.add_DirectoryServicer_to_server(directory, grpc))
    try:
        with kvpool.connect(f"grpc://{server.start('127.0.0.1', 0)}", timeout_s=LONG_S) as client:
            yield client
    finally:
        server.stop(0)


def match(keyspace, **options):
    return [keyspace.match(CHAIN, **options).reason]


def load(keyspace, **options):
    result = keyspace.load(CHAIN, np.zeros((3, 64), np.uint8), **options)
    assert (result.loaded, result.size_bytes) == (0, 0)
    return list(result.reasons)


@pytest.mark.parametrize(("call", "misses"), [(match, 1), (load, 3)])
def test_no_answer_by_the_deadline_is_over_deadline(client, call, misses):
    reasons = call(client.namespace(NAMESPACE), timeout_s=SOON_S)

    assert reasons == [kvpool.MissReason.OVER_DEADLINE] * misses
    assert client.stats().misses == {kvpool.MissReason.OVER_DEADLINE: misses}


@pytest.mark.parametrize(("call", "misses"), [(match, 1), (load, 3)])
def test_a_server_that_is_gone_is_node_down(framed, client, call, misses):
    server, _ = framed
    keyspace = client.namespace(NAMESPACE)
    server.hold.set()
    server.stop()

    assert call(keyspace) == [kvpool.MissReason.NODE_DOWN] * misses
    assert client.stats().misses == {kvpool.MissReason.NODE_DOWN: misses}
