"""A pool with TLS that two tenants share: one service and one node, whose memory one tenant alone may map."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from redis_servers import RedisServer

import kvpool
from kvpool.core.identities import META, client_identity, node_identity
from kvpool.ops.channels import Channels
from kvpool.transport.wire.connection import Connection
from tests.integration.conftest import Pool
from tests.pki import LONG_S, Pki


@dataclass(frozen=True)
class Shared:
    """The pool, and ways into it for whoever has a certificate."""

    pool: Pool
    pki: Pki

    def client(self, name, transports=("tcp",)):
        cert, key = self.pki.pair(name)
        tls = kvpool.TlsSettings(ca=self.pki.ca, cert=cert, key=key)
        return kvpool.connect(self.pool.uri, transports=list(transports), tls=tls)

    @contextmanager
    def framed(self, server, name):
        """A connection to the framed port of ``meta`` or of a node."""
        uri = self.pool.meta_ready["framed"] if server == "meta" else self.pool.ready[server]["data"]
        connection = Connection(uri, "me", LONG_S, self.pki.credentials(name).toward(_identity(server)))
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def grpc(self, server, name):
        """A channel to ``meta`` or to a node."""
        uri = self.pool.uri if server == "meta" else self.pool.ready[server]["grpc"]
        channels = Channels(uri.removeprefix("grpc://"), self.pki.credentials(name).toward(_identity(server)))
        try:
            yield channels.current()
        finally:
            channels.close()

    def audit(self, server):
        """The lines of a server's audit trail."""
        return (self.pool.directory / f"{server}.audit").read_text()


def _identity(server):
    return META if server == "meta" else node_identity(server)


@pytest.fixture(scope="package", params=["memory", "redis"])
def shared(request, tmp_path_factory):
    """What is asked of it holds wherever its state is."""
    pki = Pki(tmp_path_factory.mktemp("pki"))
    pki.issue("rival", client_identity("rival", "engine"))
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("shared"), stack)
        every = {"tls-dir": pki.folder, "http-listen": "0.0.0.0"}
        state = {}
        if request.param == "redis":
            redis = RedisServer(tmp_path_factory.mktemp("redis"))
            stack.callback(redis.kill)
            state = {"state": redis.url}
        pool.start_meta(**{"expected-nodes": 1, "audit": pool.directory / "meta.audit", **every, **state})
        pool.start_node("n0", **{"mapping": "tenant:acme", "audit": pool.directory / "n0.audit", **every})
        yield Shared(pool, pki)
