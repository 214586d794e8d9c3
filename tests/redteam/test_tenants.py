"""A client of one tenant against another tenant's blocks, on every path there is: as if they were not there."""

import os
import re
from itertools import count

import grpc
import msgspec
import numpy as np
import pytest

import kvpool
from kvpool.client import loading
from kvpool.client.explaining import explain
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import (
    ALL_SHARDS,
    NOT_ALLOWED,
    AbortRequest,
    AttachReply,
    AttachRequest,
    CommitSlotsRequest,
    DiscardRequest,
    Done,
    LocateReply,
    LocateRequest,
    MatchReply,
    MatchRequest,
    ReadReply,
    ReadRequest,
    ReleaseRequest,
    ReportBadRequest,
    ReserveReply,
    ReserveRequest,
    Statuses,
)
from kvpool.v1 import admin_pb2, admin_pb2_grpc, directory_pb2, directory_pb2_grpc
from tests.host_device import BLOCK_BYTES as DEVICE_BYTES
from tests.host_device import Device
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain
from tests.pki import LONG_S

BLOCKS = 4
_models = (f"secret-model-{os.getpid()}-{number}" for number in count())


class Theirs:
    """What tenant acme has in the pool, and all that an attacker could guess or overhear of it but its grants."""

    def __init__(self, client):
        self.client = client
        self.model = next(_models)
        self.blocks = open_blocks(client, model=self.model)
        self.id = self.blocks.namespace.id
        self.chain = random_chain(BLOCKS)
        self.bytes = random_blocks(np.random.default_rng(3), BLOCKS)
        assert self.blocks.store(self.chain, self.bytes).stored == BLOCKS
        self.located = locate(client, self.blocks, self.chain)
        [node] = client._meta.topology.nodes
        self.incarnation, self.segment = node.incarnation, node.segments[0].segment_id

    def are_whole(self):
        loaded = blank(BLOCKS)
        return self.blocks.load(self.chain, loaded).loaded == BLOCKS and np.array_equal(loaded, self.bytes)


def locate(client, keyspace, chain):
    """The answer with places and grants."""
    request = LocateRequest(keyspace.namespace.id, b"".join(chain), 0, ALL_SHARDS, 0)
    return client._meta.call(request, LocateReply, client._deadline(LONG_S), again=False)


def grant_of(located):
    [node] = located.grants.nodes
    return node.grant


@pytest.fixture
def theirs(shared):
    with shared.client("client") as client:
        yield Theirs(client)


@pytest.fixture
def rival(shared):
    with shared.client("rival") as client:
        yield client


@pytest.fixture
def own(rival):
    """A namespace of the rival's own with a block in it, and a grant for that."""
    blocks, chain = open_blocks(rival), random_chain(1)
    assert blocks.store(chain, random_blocks(np.random.default_rng(4), 1)).stored == 1
    return blocks, chain, grant_of(locate(rival, blocks, chain))


def test_the_same_prompt_hits_for_its_own_tenant_and_misses_for_the_other(theirs, rival, shared):
    blocks = open_blocks(rival, model=theirs.model)

    assert (blocks.namespace.tenant, theirs.blocks.namespace.tenant) == ("rival", "acme")
    assert blocks.match(theirs.chain) == blocks.match(random_chain(BLOCKS))
    assert blocks.load(theirs.chain, blank(BLOCKS)).loaded == 0
    with shared.client("client") as another:
        assert open_blocks(another, model=theirs.model).match(theirs.chain).blocks == BLOCKS


def test_another_tenant_cannot_be_named(theirs, rival):
    with pytest.raises(kvpool.ForbiddenError, match="of tenant 'rival' and names another one, 'acme'"):
        rival.namespace(theirs.blocks.namespace)


def framed_requests(namespace, theirs):
    """Every framed request that names a namespace, with what answers it."""
    hashes, place = b"".join(theirs.chain), (theirs.segment, *first_place(theirs))
    return [
        (MatchRequest(namespace, hashes, 0, 1000), MatchReply),
        (LocateRequest(namespace, hashes, 0, ALL_SHARDS, 0), LocateReply),
        (ReserveRequest(namespace, hashes, 0, b"", 1000, 0), ReserveReply),
        (ReportBadRequest(namespace, theirs.chain[0], *place), Done),
    ]


def first_place(theirs):
    slot, generation = np.frombuffer(theirs.located.slots, "<u4"), np.frombuffer(theirs.located.generations, "<u8")
    return int(slot[0]), int(generation[0])


def answer_to(connection, request, reply_type):
    try:
        return msgspec.msgpack.encode(connection.call(request, reply_type, LONG_S))
    except kvpool.KvpoolError as error:
        return type(error), str(error)


def test_framed_requests_about_theirs_are_answered_as_about_nobodys(theirs, shared):
    with shared.framed("meta", "rival") as connection:
        about_theirs = [answer_to(connection, *asked) for asked in framed_requests(theirs.id, theirs)]
        about_nobodys = [answer_to(connection, *asked) for asked in framed_requests(os.urandom(32), theirs)]

    assert about_theirs == about_nobodys
    assert theirs.are_whole()


def grpc_requests(namespace, theirs):
    slot, generation = first_place(theirs)
    block, hashes = theirs.chain[0], b"".join(theirs.chain)
    place = {"segment_id": theirs.segment, "slot": slot, "generation": generation}
    return {
        "DescribeNamespace": directory_pb2.DescribeNamespaceRequest(namespace=namespace),
        "Match": directory_pb2.MatchRequest(namespace=namespace, hashes=hashes, lease_ms=1000),
        "Locate": directory_pb2.LocateRequest(namespace=namespace, hashes=hashes),
        "Reserve": directory_pb2.ReserveRequest(namespace=namespace, hashes=hashes),
        "ReportBad": directory_pb2.ReportBadRequest(namespace=namespace, hash=block, **place),
        "Explain": admin_pb2.ExplainRequest(namespace=namespace, hashes=hashes),
        "GetBlock": admin_pb2.GetBlockRequest(namespace=namespace, hash=block),
        "Pin": admin_pb2.PinRequest(namespace=namespace, hash=block),
        "Unpin": admin_pb2.UnpinRequest(namespace=namespace, hash=block),
    }


def grpc_answers(channel, namespace, theirs):
    stubs = (directory_pb2_grpc.DirectoryStub(channel), admin_pb2_grpc.AdminStub(channel))
    answers = {}
    for name, request in grpc_requests(namespace, theirs).items():
        method = next(getattr(stub, name) for stub in stubs if hasattr(stub, name))
        try:
            answers[name] = method(request, timeout=LONG_S).SerializeToString()
        except grpc.RpcError as error:
            said = error.details().replace(namespace.hex()[:16], "ID")
            answers[name] = (error.code(), said, error.trailing_metadata())
    return answers


def test_grpc_calls_about_theirs_are_answered_as_about_nobodys(theirs, shared):
    with shared.grpc("meta", "rival") as channel:
        about_theirs, about_nobodys = (grpc_answers(channel, n, theirs) for n in (theirs.id, os.urandom(32)))

    assert about_theirs == about_nobodys
    assert not re.search(f"{theirs.model}|acme", repr(about_theirs))
    assert theirs.are_whole()


def test_no_slot_of_theirs_is_read_by_guessing_where_it_is(theirs, own, shared):
    _, _, grant = own
    where = (theirs.segment, theirs.located.slots, theirs.located.generations, BLOCK_BYTES)

    with shared.framed("n0", "rival") as connection:
        with pytest.raises(kvpool.ForbiddenError, match="blocks are read under a read grant"):
            connection.call(ReadRequest(*where), ReadReply, LONG_S)
        with pytest.raises(kvpool.StaleGrantError):
            connection.call(ReadRequest(*where, bytes(100)), ReadReply, LONG_S)
        guessed = connection.call(ReadRequest(*where, grant), ReadReply, LONG_S)
        later = np.frombuffer(theirs.located.generations, "<u8") + np.uint64(1 << 40)
        absent = connection.call(ReadRequest(*where[:2], later.tobytes(), BLOCK_BYTES, grant), ReadReply, LONG_S)

    assert guessed == absent == ReadReply(bytes(BLOCKS))


def test_a_grant_reads_its_own_namespace(theirs, own, shared):
    blocks, chain, grant = own
    located = locate(blocks._client, blocks, chain)

    with shared.framed("n0", "rival") as connection:
        where = (theirs.segment, located.slots, located.generations, BLOCK_BYTES, grant)
        connection.post(ReadRequest(*where), LONG_S)
        reply, size_bytes = connection.begin(ReadReply, LONG_S)

    assert (reply.present, size_bytes) == (b"\x01", BLOCK_BYTES)


def test_nothing_of_theirs_is_written_over(theirs, own, shared):
    slot, generation = first_place(theirs)
    packed = (np.array([slot], "<u4").tobytes(), np.array([generation], "<u8").tobytes())

    with shared.framed("n0", "rival") as connection:
        committed = connection.call(CommitSlotsRequest(theirs.segment, 1, *packed, bytes(8)), Statuses, LONG_S)
        discarded = connection.call(DiscardRequest(theirs.segment, *packed), Done, LONG_S)

    assert (committed.statuses, discarded) == (b"\x01", Done(0))
    blocks, _, _ = own
    again = blocks.store(theirs.chain, random_blocks(np.random.default_rng(5), BLOCKS))
    assert again.stored == BLOCKS, "the same hashes are other blocks in another namespace"
    assert theirs.are_whole()


def test_nothing_of_theirs_is_evicted_by_a_complaint(theirs, own, shared):
    blocks, _, _ = own
    with shared.framed("meta", "rival") as connection:
        for namespace in (theirs.id, blocks.namespace.id):
            request = ReportBadRequest(namespace, theirs.chain[0], theirs.segment, *first_place(theirs))
            try:
                assert connection.call(request, Done, LONG_S) == Done(0)
            except kvpool.UnknownNamespaceError:
                assert namespace == theirs.id
    assert theirs.are_whole()


def test_no_lease_and_no_reservation_of_theirs_is_ended_by_its_number(theirs, shared):
    lease = theirs.blocks.match(theirs.chain, lease_s=20).lease
    reserved = theirs.blocks.reserve(random_chain(2))

    with shared.framed("meta", "rival") as connection:
        assert connection.call(ReleaseRequest(lease), Done, LONG_S) == Done(0)
        assert connection.call(AbortRequest(reserved.number, b"", crowded=False), Done, LONG_S) == Done(0)
    with shared.framed("meta", "client") as connection:
        assert connection.call(ReleaseRequest(lease), Done, LONG_S) == Done(1)
        assert connection.call(AbortRequest(reserved.number, b"", crowded=False), Done, LONG_S) == Done(2)


def test_a_list_shows_each_tenant_its_own(theirs, own, shared, rival):
    blocks, _, _ = own
    for client, seen, unseen in (
        (rival, blocks.namespace, theirs.blocks.namespace),
        (theirs.client, theirs.blocks.namespace, blocks.namespace),
    ):
        status = client.status()
        assert seen.id.hex() in status.namespaces
        assert unseen.id.hex() not in status.namespaces
        assert (status.counters, status.nodes[0].state) == ({}, "ready")
    with shared.client("observer") as observer:
        status = observer.status()
    assert {seen.id.hex(), unseen.id.hex()} <= status.namespaces.keys()
    assert status.counters["blocks"] > 0


@pytest.mark.parametrize("how", ["everywhere", "model", "document"])
def test_nothing_is_explained_of_theirs(theirs, own, rival, how):
    where = {"everywhere": None, "model": theirs.model, "document": theirs.blocks.namespace}[how]

    explained = explain(rival, theirs.chain, where)
    nobodys = explain(rival, random_chain(BLOCKS), where)

    assert {block.reason for block in explained.blocks} == {kvpool.MissReason.COLD}
    said, of_nobodys = ([(b.reason, b.nodes, b.elsewhere) for b in e.blocks] for e in (explained, nobodys))
    assert said == of_nobodys
    assert {block.reason for block in explain(theirs.client, theirs.chain, where).blocks} == {None}


def test_the_memory_is_mapped_by_its_tenant_alone(theirs, own, shared):
    _, _, grant = own
    connection = Connection(f"unix://{shared.pool.ready['n0']['unix']}", "me", LONG_S)
    try:
        assert connection.call(AttachRequest(theirs.segment, grant), AttachReply, LONG_S) == AttachReply(NOT_ALLOWED)
        with pytest.raises(kvpool.ForbiddenError):
            connection.call(AttachRequest(theirs.segment), AttachReply, LONG_S)
        reply = connection.call(AttachRequest(theirs.segment, grant_of(theirs.located)), AttachReply, LONG_S)
        assert reply.size_bytes > 0
        for descriptor in connection.take_descriptors(2):
            os.close(descriptor)
    finally:
        connection.close()


def test_who_may_not_map_goes_through_frames_and_that_is_seen(theirs, shared):
    written, loaded = random_blocks(np.random.default_rng(6), 2), blank(2)
    for name, way in (("rival", "unix"), ("client", "shm")):
        with shared.client(name, ("shm",)) as client:
            blocks, chain = open_blocks(client), random_chain(2)
            assert blocks.store(chain, written).stored == 2
            assert blocks.load(chain, loaded).loaded == 2
            assert np.array_equal(loaded, written)
            assert client.stats().loaded_bytes == {way: loaded.nbytes}
            assert client.stats().fallbacks == (name == "rival")


def test_a_grant_that_is_over_costs_one_more_look_and_nothing_else(theirs):
    grants = theirs.blocks._grants
    grants._latest = (grants.version, {theirs.incarnation: b"of another session".ljust(64)})

    assert theirs.are_whole()
    assert theirs.client.stats().misses == {}
    assert grants.of(theirs.incarnation) != b""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_each_step_of_a_long_load_with_grants_that_are_over_looks_once_more(
    theirs, shared, monkeypatch, transport, far
):
    """Into far memory all steps are begun ahead, with what grants there are; else the next ones have the new grants."""
    looked, look = [], loading.locate
    monkeypatch.setattr(loading, "locate", lambda *args: looked.append(args[3]) or look(*args))
    for name in ("STEP_BLOCKS", "FAR_STEP_BLOCKS", "FAR_STEP_BLOCKS_MAX"):
        monkeypatch.setattr(loading, name, 1)
    device, steps = Device(BLOCKS), [range(i, i + 1) for i in range(BLOCKS)]
    with shared.client("client", (transport,)) as client:
        blocks = open_blocks(client, DEVICE_BYTES, model=theirs.model)
        written, chain = random_blocks(np.random.default_rng(7), BLOCKS, DEVICE_BYTES), random_chain(BLOCKS)
        assert open_blocks(theirs.client, DEVICE_BYTES, model=theirs.model).store(chain, written).stored == BLOCKS
        version = locate(client, blocks, chain).grants.version
        blocks._grants._latest = (version, {theirs.incarnation: b"of another session".ljust(64)})
        loaded = blocks.load(chain, device.blocks(range(BLOCKS)) if far else device.memory)

        assert loaded.reasons == (None,) * BLOCKS
        assert np.array_equal(device.memory, written)
        assert looked == (steps if far else steps[:1])
        assert client.stats().misses == {}


def test_the_audit_trail_says_who_and_shows_nothing_secret(theirs, rival, shared):
    with shared.grpc("meta", "client") as channel:
        pin = admin_pb2.PinRequest(namespace=theirs.id, hash=theirs.chain[0], ttl_ms=1000)
        assert admin_pb2_grpc.AdminStub(channel).Pin(pin, timeout=LONG_S).pinned
    with pytest.raises(kvpool.ForbiddenError):
        rival.namespace(theirs.blocks.namespace)

    lines = [msgspec.json.decode(line) for line in shared.audit("meta").splitlines()]

    def said(action, **fields):
        return [line for line in lines if line["action"] == action and fields.items() <= line.items()]

    ours = {"by": "engine", "tenant": "acme", "roles": "client"}
    assert said("namespace_opened", model=theirs.model, **ours)
    assert said("pinned", block=theirs.chain[0].hex()[:8], namespace=theirs.id.hex()[:8], done=True, **ours)
    assert said("refused", what="OpenNamespace", tenant="rival")
    assert theirs.chain[0].hex()[:16] not in shared.audit("meta")
