"""What only a node may say of itself: who has its session number and not its certificate is refused."""

import re

import grpc
import numpy as np
import pytest

import kvpool
from kvpool.core.identities import META
from kvpool.core.principals import Principal, Role, anyone
from kvpool.embedded import EmbeddedPool
from kvpool.node.servicer import owner_of
from kvpool.ops.channels import Channels
from kvpool.ops.settings import MetaSettings, NodeSettings
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import PROTOCOL_VERSION, CommitRequest, Done, GoneRequest, Statuses
from kvpool.v1 import membership_pb2, membership_pb2_grpc
from tests.integration.conftest import blank, open_blocks, random_blocks, random_chain
from tests.pki import LONG_S, Pki

OTHERS = ("client", "admin", "observer", "node-n1")
FOR_A_NODE = "this is for node 'n0' alone|that is for: node"


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path)


@pytest.fixture
def embedded(tmp_path, pki):
    """A pool of one node, n0, in this process, whose state the test can look into."""
    node = NodeSettings(
        node_id="n0",
        size="4MiB",
        data_port=0,
        grpc_port=0,
        segment_dir=tmp_path,
        unix_socket=tmp_path / "n0.sock",
        keep_segment=False,
    )
    settings = MetaSettings(grpc_port=0, framed_port=0)
    with EmbeddedPool(settings, node, tls=kvpool.TlsSettings(dir=pki.folder)) as pool:
        yield pool


@pytest.fixture
def member(embedded):
    """The node's session: an attacker has guessed or overheard it."""
    return next(iter(embedded.meta.service._members))


@pytest.fixture
def held(embedded):
    """A block that the node holds: its namespace, its hash, and where it is."""
    with embedded.connect(transports=["tcp"]) as client:
        blocks, chain = open_blocks(client), random_chain(1)
        assert blocks.store(chain, random_blocks(np.random.default_rng(1), 1)).stored == 1
        location = embedded.meta.service.locate(blocks.namespace.id, chain[0], 0, None)
        yield blocks, chain, (location.slot, location.generation)


def dial(embedded, pki, name):
    return Connection(f"tls://{embedded.meta.framed_address}", "n0", LONG_S, pki.credentials(name).toward(META))


@pytest.mark.parametrize("name", OTHERS)
def test_only_a_node_says_that_its_blocks_are_gone(embedded, pki, member, held, name):
    blocks, chain, (slots, generations) = held
    where = (member.session, member.segments[0].segment_id, blocks.namespace.id)
    request = GoneRequest(*where, chain[0], slots.tobytes(), generations.tobytes(), bad=True)
    connection = dial(embedded, pki, name)
    try:
        with pytest.raises(kvpool.ForbiddenError, match=FOR_A_NODE):
            connection.call(request, Done, LONG_S)
    finally:
        connection.close()

    assert blocks.load(chain, blank(1)).loaded == 1

    its_own = dial(embedded, pki, "node-n0")
    try:
        assert its_own.call(request, Done, LONG_S) == Done(1)
    finally:
        its_own.close()
    assert blocks.match(chain).blocks == 0


@pytest.mark.parametrize("name", OTHERS)
def test_only_a_node_commits_its_blocks(embedded, pki, member, name):
    segment = member.segments[0].segment_id
    request = CommitRequest(member.session, segment, 1, bytes(32), bytes(2), bytes(4), bytes(8), bytes(8))
    connection = dial(embedded, pki, name)
    try:
        with pytest.raises(kvpool.ForbiddenError, match=FOR_A_NODE):
            connection.call(request, Statuses, LONG_S)
    finally:
        connection.close()

    channels = Channels(embedded.meta.grpc_address, pki.credentials(name).toward(META))
    commit = membership_pb2.CommitRequest(
        session=member.session,
        segment_id=segment,
        reservation=1,
        hashes=bytes(32),
        shard=[0],
        slot=[0],
        generation=[0],
        checksum=[0],
    )
    try:
        stub = membership_pb2_grpc.MembershipStub(channels.current())
        with pytest.raises(grpc.RpcError) as refused:
            stub.Commit(commit, timeout=LONG_S)
    finally:
        channels.close()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert re.search(FOR_A_NODE, refused.value.details())


def test_who_claims_another_nodes_name_is_counted(embedded, pki):
    channels = Channels(embedded.meta.grpc_address, pki.credentials("node-n1").toward(META))
    before = embedded.meta._refusals()["refused_callers"]
    hello = membership_pb2.FromNode(hello=membership_pb2.NodeHello(node_id="n0", protocol=PROTOCOL_VERSION))
    try:
        stub = membership_pb2_grpc.MembershipStub(channels.current())
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Control(iter([hello]), timeout=LONG_S))
    finally:
        channels.close()

    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert embedded.meta._refusals()["refused_callers"] == before + 1


def test_what_one_tenant_prepares_over_grpc_no_other_ends_by_its_number():
    callers = [Principal(n, frozenset({Role.CLIENT}), t) for n, t in (("e", "acme"), ("e", "rival"), ("f", "acme"))]

    assert len({owner_of(caller, 7) for caller in callers}) == 3
    assert owner_of(callers[0], 7) == owner_of(callers[0], 7) != owner_of(callers[0], 8)
    assert owner_of(anyone("here"), 7) == owner_of(anyone("there"), 7)  # nobody is told from anybody
