"""Callers who are nobody, or not who they say: refused by every server, in words, and counted."""

import ipaddress
import os
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack

import grpc
import numpy as np
import psutil
import pytest

import kvpool
from kvpool.core.identities import META, node_identity
from kvpool.ops.channels import Channels
from kvpool.ops.tokens import new_token, token_digest
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.frame import HEADER_BYTES, parse_header
from kvpool.transport.wire.messages import PROTOCOL_VERSION, Hello, decode
from kvpool.v1 import admin_pb2, admin_pb2_grpc, membership_pb2, membership_pb2_grpc, store_node_pb2
from kvpool.v1.store_node_pb2_grpc import StoreNodeStub
from tests.framed_peer import frame, receive_frame
from tests.integration.conftest import Pool, blank, embedded_in, open_blocks, random_blocks, random_chain
from tests.pki import LONG_S, Pki

BAD = ("expired", "early", "foreign")
"""Certificates that the handshake refuses."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def token():
    return new_token()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, pki, token):
    """A pool with TLS; the service and n0 take tokens, n1 certificates alone."""
    tokens = pki.folder / "tokens"
    tokens.write_text(f"# engines\n{token_digest(token)} kvpool://client/acme/by-token\n")
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        tls = {"tls-dir": pki.folder}
        pool.start_meta(**{"expected-nodes": 2, "token-port": 0, "tls-tokens": tokens, **tls})
        pool.start_node("n0", **{"tls-tokens": tokens, **tls})
        pool.start_node("n1", **tls)
        yield pool


@pytest.fixture
def plain(tmp_path):
    with embedded_in(tmp_path, "e0", "4MiB") as pool:
        yield pool


@pytest.fixture
def admin(guarded, pki):
    """The admin's client."""
    tls = kvpool.TlsSettings(ca=pki.ca, cert=pki.pair("admin")[0], key=pki.pair("admin")[1])
    with kvpool.connect(guarded.uri, tls=tls) as client:
        yield client


def framed_uri(pool, server):
    return pool.meta_ready["framed"] if server == "meta" else pool.ready[server]["data"]


def grpc_address(pool, server):
    return (pool.uri if server == "meta" else pool.ready[server]["grpc"]).removeprefix("grpc://")


def identity(server):
    return META if server == "meta" else node_identity(server)


def refused_callers(pool, pki, server):
    """The server's own count of whom it refused."""
    channels = Channels(grpc_address(pool, server), pki.credentials("admin").toward(identity(server)))
    try:
        if server == "meta":
            stub = admin_pb2_grpc.AdminStub(channels.current())
            counters = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=LONG_S).counters
        else:
            counters = StoreNodeStub(channels.current()).Stat(store_node_pb2.StatRequest(), timeout=LONG_S).counters
        return counters["refused_callers"]
    finally:
        channels.close()


def log_of(pool, server):
    return (pool.directory / f"{server}.log").read_text()


def refusal(pki, uri, name):
    """Why a server's framed port does not take a certificate: the alert that it sends."""
    with pki.dial(uri, name) as secured, pytest.raises(ssl.SSLError) as refused:
        secured.recv(1)  # with TLS 1.3 a caller is refused after its own side of the handshake has ended
    return refused.value.reason


@pytest.mark.parametrize("server", ["meta", "n0", "n1"])
@pytest.mark.parametrize(
    ("name", "alert", "words"),
    [
        ("expired", "CERTIFICATE_EXPIRED", "certificate has expired"),
        ("early", "BAD_CERTIFICATE", "certificate is not yet valid"),
        ("foreign", "UNKNOWN_CA", "unable to get local issuer certificate"),
    ],
)
def test_a_bad_certificate_is_refused_on_framed_ports(guarded, pki, server, name, alert, words):
    before = refused_callers(guarded, pki, server)

    reason = refusal(pki, framed_uri(guarded, server), name)

    assert alert in reason
    assert refused_callers(guarded, pki, server) == before + 1
    assert words in log_of(guarded, server)


@pytest.mark.parametrize("server", ["meta", "n0"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_certificate_is_refused_by_grpc(guarded, pki, server, name):
    cert, key = pki.pair(name)
    credentials = grpc.ssl_channel_credentials(pki.ca.read_bytes(), key.read_bytes(), cert.read_bytes())
    name_override = ("grpc.ssl_target_name_override", "meta.kvpool" if server == "meta" else f"{server}.node.kvpool")

    with grpc.secure_channel(grpc_address(guarded, server), credentials, options=[name_override]) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=LONG_S)

    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("server", ["meta", "n0"])
def test_a_certificate_without_a_name_of_ours_is_nobody(guarded, pki, server):
    before = refused_callers(guarded, pki, server)

    answer = answer_to_hello(pki, framed_uri(guarded, server), "stranger")

    assert (answer.error, "who calls?" in answer.message) == ("AuthenticationError", True)
    assert refused_callers(guarded, pki, server) == before + 1


def answer_to_hello(pki, uri, name=None, token=""):
    """What a framed port says to a greeting by whoever gets through its handshake."""
    with pki.dial(uri, name) as secured:
        secured.sendall(frame(Hello(PROTOCOL_VERSION, "me", token), 1))
        reply = receive_frame(secured)
    return decode(parse_header(reply[:HEADER_BYTES]).kind, bytearray(reply[HEADER_BYTES:]))


def test_without_a_certificate_nobody_is_let_in(guarded, pki):
    assert "CERTIFICATE_REQUIRED" in refusal(pki, framed_uri(guarded, "n1"), None)
    assert "nor a token" in answer_to_hello(pki, framed_uri(guarded, "n0")).message
    assert "peer did not return a certificate" in log_of(guarded, "n1")


def test_a_token_proves_a_client(guarded, pki, token):
    tls = kvpool.TlsSettings(ca=pki.ca, token=token)
    with kvpool.connect(guarded.meta_ready["for_tokens"], transports=["tcp"], tls=tls) as client:
        blocks, chain = open_blocks(client), random_chain(4)
        written, loaded = random_blocks(np.random.default_rng(7), 4), blank(4)
        # n1 takes certificates alone: what would go there is refused, and the rest is stored.
        blocks.store(chain[:1], written[:1])
        held = blocks.load(chain[:1], loaded[:1]).loaded

        assert (loaded[:held] == written[:held]).all()
        assert client.status().security == "tls"


@pytest.mark.parametrize("wrong", ["", "x" * 43])
def test_a_wrong_token_proves_nothing(guarded, pki, wrong):
    before = refused_callers(guarded, pki, "meta")
    assert answer_to_hello(pki, framed_uri(guarded, "meta"), token=wrong).error == "AuthenticationError"
    credentials = grpc.ssl_channel_credentials(pki.ca.read_bytes())
    address = guarded.meta_ready["for_tokens"].removeprefix("grpc://")
    options = [("grpc.ssl_target_name_override", "meta.kvpool")]
    with grpc.secure_channel(address, credentials, options=options) as channel:
        for method in ("/kvpool.v1.Admin/GetStatus", "/kvpool.v1.Directory/GetPool", "/kvpool.v1.Membership/Commit"):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(method)(b"", timeout=LONG_S, metadata=[("authorization", f"Bearer {wrong}")])
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert refused_callers(guarded, pki, "meta") == before + 4


def test_health_is_open_to_whoever_ended_the_handshake(guarded, pki):
    credentials = grpc.ssl_channel_credentials(pki.ca.read_bytes())
    address = guarded.meta_ready["for_tokens"].removeprefix("grpc://")
    with grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", "meta.kvpool")]) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=LONG_S) == b"\x08\x01"


def test_a_token_is_for_its_own_port(guarded, pki, token):
    with pytest.raises(kvpool.AuthenticationError, match="wants a certificate, and this process has a token"):
        kvpool.connect(guarded.uri, tls=kvpool.TlsSettings(ca=pki.ca, token=token))


@pytest.mark.parametrize(
    ("name", "node_id"), [("client", "n0"), ("admin", "n0"), ("node-n1", "n0"), ("observer", "n9")]
)
def test_a_node_is_joined_by_itself_alone(guarded, pki, name, node_id):
    channels = Channels(grpc_address(guarded, "meta"), pki.credentials(name).toward(META))
    hello = membership_pb2.NodeHello(node_id=node_id, incarnation=1, protocol=PROTOCOL_VERSION)
    try:
        control = membership_pb2_grpc.MembershipStub(channels.current()).Control
        with pytest.raises(grpc.RpcError) as refused:
            next(control(iter([membership_pb2.FromNode(hello=hello)]), timeout=LONG_S))
    finally:
        channels.close()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    alone = (
        f"this is for node '{node_id}' alone" if name.startswith("node-") else "may not call Control; that is for: node"
    )
    assert alone in refused.value.details()


def test_the_services_own_certificate_calls_nobody(guarded, pki):
    with pytest.raises(kvpool.AuthenticationError, match="is no identity of a caller"):
        Connection(framed_uri(guarded, "n0"), "me", LONG_S, pki.credentials("meta").toward(node_identity("n0")))


@pytest.mark.parametrize(
    ("there", "wanted"), [("n1", node_identity("n0")), ("n0", META), ("meta", node_identity("n0"))]
)
def test_a_server_is_not_taken_for_another(guarded, pki, there, wanted):
    peer = pki.credentials("client").toward(wanted)
    with pytest.raises(kvpool.AuthenticationError, match=f"should be {wanted}; its certificate says"):
        Connection(framed_uri(guarded, there), "me", LONG_S, peer)
    channels = Channels(grpc_address(guarded, there), peer)
    try:
        with pytest.raises(grpc.RpcError, match="Hostname Verification Check failed"):
            channels.current().unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=LONG_S)
    finally:
        channels.close()


def test_a_server_of_another_ca_is_not_believed(guarded, pki):
    cert, key = pki.pair("foreign")
    tls = kvpool.TlsSettings(ca=pki.foreign / "ca.pem", cert=cert, key=key)
    with pytest.raises(kvpool.AuthenticationError, match="is not believed: unable to get local issuer certificate"):
        kvpool.connect(guarded.uri, tls=tls)


@pytest.mark.parametrize("server", ["meta", "n0"])
def test_plaintext_on_a_port_with_tls_is_refused(guarded, pki, server):
    before = refused_callers(guarded, pki, server)
    with pytest.raises(kvpool.KvpoolError):
        Connection(framed_uri(guarded, server).replace("tls://", "tcp://"), "me", LONG_S)
    assert refused_callers(guarded, pki, server) == before + 1
    assert "the other side does not speak TLS" in log_of(guarded, server)


def test_a_client_without_certificates_is_told_to_name_some(guarded):
    with pytest.raises(kvpool.AuthenticationError, match="it speaks TLS: name certificates"):
        kvpool.connect(guarded.uri)
    with pytest.raises(kvpool.AuthenticationError, match="speaks TLS; name certificates"):
        Connection(framed_uri(guarded, "n0"), "me", LONG_S)


def test_tls_on_a_plaintext_port_is_refused(plain, pki):
    peer = pki.credentials("client").toward(META)
    with pytest.raises(kvpool.AuthenticationError, match="does not speak TLS"):
        Connection(f"tls://{plain.meta.framed_address}", "me", LONG_S, peer)
    with pytest.raises(kvpool.AuthenticationError, match="does not speak TLS"):
        kvpool.connect(plain.uri, tls=kvpool.TlsSettings(dir=pki.folder))


def test_peers_that_never_end_their_handshakes_hold_up_nobody(guarded, admin):
    with ExitStack() as stack:
        for server in ("meta", "n0", "n1"):
            port = int(framed_uri(guarded, server).rpartition(":")[2])
            for first in (b"", b"\x16\x03\x01\x02\x00"):
                for _ in range(8):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(first)
        statuses = admin.status(reach=True).nodes
    assert [node.state for node in statuses] == ["ready", "ready"]
    assert all(node.transport for node in statuses)


def test_only_the_ports_that_were_announced_are_open(guarded):
    ready = [guarded.meta_ready, *guarded.ready.values()]
    announced = {int(uri.rpartition(":")[2]) for said in ready for uri in said.values() if "://127" in str(uri)}

    pids = [guarded.meta.pid, *(node.pid for node in guarded.nodes.values())]
    listening = [
        connection.laddr
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert {address.port for address in listening} == announced
    assert {ipaddress.ip_address(address.ip.removeprefix("::ffff:")).is_loopback for address in listening} == {True}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_unix_socket_serves_its_own_user_alone(guarded):
    path = guarded.directory / "n0.sock"
    # The socket's mode keeps others out already: here it is open to all, and a process of another user connects.
    code = (
        "import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX); s.connect(os.environ['WHERE']); print(s.recv(100))"
    )
    opened = [parent for parent in (path, *path.parents) if parent != parent.parent]
    modes = [(parent, parent.stat().st_mode & 0o7777) for parent in opened]
    try:
        for parent, mode in modes:
            parent.chmod(mode | 0o777 if parent == path else mode | 0o001)
        environ = {"WHERE": str(path), "PATH": os.environ["PATH"]}
        command = [sys.executable, "-c", code]
        refused = subprocess.run(command, env=environ, stdout=subprocess.PIPE, timeout=LONG_S, check=True)
    finally:
        for parent, mode in modes:
            parent.chmod(mode)
    assert refused.stdout == b"b''\n"
    assert "a process of user 65534" in log_of(guarded, "n0")
