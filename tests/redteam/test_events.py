"""The event stream of a pool with TLS: whoever is no follower hears nothing, and nothing that is said to it hurts."""

import time
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

import kvpool
from kvpool.core.errors import UnavailableError
from kvpool.core.identities import client_identity
from kvpool.core.limits import PAGE_BYTES
from kvpool.embedded import EmbeddedPool
from kvpool.events import Follower, Source
from kvpool.events import follower as follower_module
from kvpool.ops.curve import CurveKeys, follower_keys, make_keys, read_keys, secret_file
from kvpool.ops.settings import MetaSettings, NodeSettings
from kvpool.transport.wire import events as wire
from tests.integration.conftest import open_blocks, random_chain
from tests.pki import LONG_S, Pki
from tests.waiting import eventually


def publishing(folder, tls=None, **meta):
    """A pool of one node in this process that publishes events."""
    node = NodeSettings(
        node_id="n0", size="4MiB", data_port=0, grpc_port=0, segment_dir=folder, unix_socket=folder / "n0.sock",
        keep_segment=False,
    )  # fmt: skip
    return EmbeddedPool(MetaSettings(grpc_port=0, framed_port=0, events_port=0, **meta), node, tls=tls)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def guarded(tmp_path, pki):
    """A pool with TLS that publishes events, a client of it, and a right follower."""
    with ExitStack() as stack:
        tls = kvpool.TlsSettings(dir=pki.folder)
        pool = stack.enter_context(publishing(tmp_path, tls))
        endpoints = pool.meta.event_endpoints
        client = stack.enter_context(kvpool.connect(pool.uri, transports=["tcp"], tls=tls))
        follower = stack.enter_context(Follower(*endpoints, follower_keys(pki.folder)))
        assert [told.source for told in follower.poll(LONG_S)] == [Source.SNAPSHOT]
        yield pool, client, follower


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def callers(pki):
    """Keys of those who are no followers: none at all, new ones, the service's own, and right ones for another pool."""
    server = follower_keys(pki.folder).server
    fresh = zmq.curve_keypair()
    own = read_keys(secret_file(pki.folder, "meta"))
    right = read_keys(secret_file(pki.folder, "observer"))
    return {
        "plaintext": None,
        "a key that nobody knows": CurveKeys(*fresh, server),
        "the service's own key": CurveKeys(own.public, own.secret, server),
        "another's public key": CurveKeys(right.public, fresh[1], server),
        "a wrong service": CurveKeys(right.public, right.secret, fresh[0]),
    }


def dial(context, kind, endpoint, keys):
    sock = context.socket(kind)
    sock.linger = 0
    if keys is not None:
        sock.curve_publickey, sock.curve_secretkey, sock.curve_serverkey = keys.public, keys.secret, keys.server
    monitored = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    sock.connect(endpoint)
    return sock, monitored


def outcome(monitored):
    """How its first connection began or ended."""
    assert monitored.poll(LONG_S * 1e3)
    return recv_monitor_message(monitored)["event"]


def test_who_is_no_follower_hears_nothing(guarded, pki, context):
    pool, client, follower = guarded
    stream, replays = pool.meta.event_endpoints
    strangers = []
    for keys in callers(pki).values():
        listening, monitored = dial(context, zmq.SUB, stream, keys)
        listening.subscribe(b"")
        asking, asking_monitored = dial(context, zmq.DEALER, replays, keys)
        asking.send_multipart((b"", wire.pack_sequence(0)))
        asking.send_multipart((b"", wire.encode(wire.SnapshotRequest(0, 1))))
        strangers += [(listening, monitored), (asking, asking_monitored)]
    assert {outcome(monitored) for _, monitored in strangers} == {zmq.EVENT_DISCONNECTED}

    blocks = open_blocks(client, PAGE_BYTES, tenant="acme")
    assert blocks.store(random_chain(4), np.ones((4, PAGE_BYTES), np.uint8)).stored == 4
    eventually(lambda: follower.poll(1.0) and follower.index.blocks == 4)

    heard = [stranger for stranger, _ in strangers if stranger.poll(0)]
    assert heard == []
    assert pool.meta.events.counts()["events_refused_callers"] >= 4
    context.destroy(linger=0)


def test_a_client_of_a_tenant_is_given_no_key_for_events(tmp_path):
    folder = tmp_path / "certs"
    folder.mkdir()
    make_keys(folder, {"admin": "kvpool://admin/admin", "client": client_identity("acme", "engine")})

    assert not secret_file(folder, "client").exists()
    assert "client" not in (folder / "events-followers").read_text()


HOSTILE = {
    "no frame": [b""],
    "an empty request": [b"", b""],
    "a short number": [b"", b"1234567"],
    "no separator": [b"x", bytes(8)],
    "many frames": [b""] * 100,
    "no message": [b"", b"\xc1\xc1\xc1"],
    "deep": [b"", b"\x91" * 60],
    "too much at once": [b"", msgspec.msgpack.encode(["snapshot", 0, 1 << 30])],
    "before the beginning": [b"", msgspec.msgpack.encode(["snapshot", -5, 1])],
    "beyond the end": [b"", msgspec.msgpack.encode(["snapshot", (1 << 31) - 1, 1])],
}


def test_requests_that_are_none_are_refused_and_others_are_answered(tmp_path, context):
    """On loopback, where anybody may ask; the last one here is right, and its part is empty."""
    with publishing(tmp_path) as pool:
        asking, _ = dial(context, zmq.DEALER, pool.meta.event_endpoints[1], None)
        for frames in HOSTILE.values():
            asking.send_multipart(frames)
        assert asking.poll(LONG_S * 1e3)
        part = wire.decode_part(asking.recv_multipart()[1])
        assert (part.events, part.following) == ([], None)
        assert not asking.poll(0)
        assert pool.meta.events.counts()["events_refused_requests"] == len(HOSTILE) - 1

        # Longer than any request: its connection ends, and the next one is as good as any.
        asking.send_multipart((b"", bytes(1 << 20)))
        with Follower(*pool.meta.event_endpoints) as follower:
            assert [told.source for told in follower.poll(LONG_S)] == [Source.SNAPSHOT]
        context.destroy(linger=0)


def test_who_asks_and_never_reads_is_not_waited_for(tmp_path, context):
    with publishing(tmp_path, events_replay_batches=2) as pool, pool.connect() as client:
        asking, _ = dial(context, zmq.DEALER, pool.meta.event_endpoints[1], None)
        asking.rcvhwm = 1
        blocks = open_blocks(client, PAGE_BYTES)
        blocks.store(random_chain(256), np.ones((256, PAGE_BYTES), np.uint8))
        give_up_s = time.monotonic() + LONG_S
        while not pool.meta.events.counts()["events_dropped"] and time.monotonic() < give_up_s:
            asking.send_multipart((b"", wire.encode(wire.SnapshotRequest(0, wire.PART_ROWS_MAX))))
        assert pool.meta.events.counts()["events_dropped"]

        with Follower(*pool.meta.event_endpoints) as follower:
            follower.poll(LONG_S)
            assert follower.index.blocks == 256
        context.destroy(linger=0)


def test_who_follows_is_decided_while_the_service_runs(guarded, pki, monkeypatch):
    pool, _, _ = guarded
    monkeypatch.setattr(follower_module, "ANSWER_S", 1.0)
    path, observer = pki.folder / "events-followers", read_keys(secret_file(pki.folder, "observer"))
    before = path.read_text()
    path.write_text("".join(line for line in before.splitlines(keepends=True) if "observer" not in line))

    keys = CurveKeys(observer.public, observer.secret, follower_keys(pki.folder).server)
    with Follower(*pool.meta.event_endpoints, keys) as follower:
        with pytest.raises(UnavailableError, match="does not serve this key"):
            follower.poll(0.0)
        path.write_text(before)
        monkeypatch.undo()
        assert [told.source for told in follower.poll(LONG_S)] == [Source.SNAPSHOT]
