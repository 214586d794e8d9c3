"""Parts of two releases that do not speak the same protocol: refused, and both versions are named."""

import queue
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import kvpool
from kvpool.node.server import NodeServer
from kvpool.ops.settings import NodeSettings
from kvpool.transport.wire.messages import PROTOCOL_VERSION
from kvpool.v1 import membership_pb2, membership_pb2_grpc

OTHER = PROTOCOL_VERSION + 1


class OtherService(membership_pb2_grpc.MembershipServicer):
    """A metadata service of another release."""

    def Control(self, request_iterator, context):  # noqa: N802 - the name in the proto
        assert next(request_iterator).hello.protocol == PROTOCOL_VERSION
        yield membership_pb2.ToNode(welcome=membership_pb2.NodeWelcome(protocol=OTHER))


@pytest.fixture
def other_service():
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        membership_pb2_grpc.add_MembershipServicer_to_server(OtherService(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.mark.parametrize("version", [0, OTHER])
def test_a_node_of_another_version_is_refused(embedded, version):
    said = queue.SimpleQueue()
    said.put(membership_pb2.FromNode(hello=membership_pb2.NodeHello(node_id="old", incarnation=1, protocol=version)))
    with grpc.insecure_channel(embedded.meta.grpc_address) as channel:
        call = membership_pb2_grpc.MembershipStub(channel).Control(iter(said.get, None))
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        said.put(None)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"'old' speaks version {version}, this service {PROTOCOL_VERSION}" in refused.value.details()


def test_a_service_of_another_version_is_not_joined(other_service, tmp_path):
    settings = NodeSettings(
        node_id="new",
        meta=other_service,
        size=1 << 20,
        segment_dir=tmp_path,
        unix_socket=tmp_path / "s",
        data_port=0,
        grpc_port=0,
        join_timeout_s=1,
    )
    node = NodeServer(settings)
    with pytest.raises(kvpool.UnavailableError, match=f"speaks version {OTHER}, this node {PROTOCOL_VERSION}"):
        node.start()
    node.stop()
