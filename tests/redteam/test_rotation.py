"""Certificates and tokens that are replaced while a pool runs: new connections take the new ones, and nothing fails."""

import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import kvpool
from kvpool.core.identities import META, node_identity
from kvpool.ops.tokens import new_token, token_digest
from kvpool.transport.wire.connection import Connection
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain
from tests.pki import LONG_S, Pki
from tests.waiting import eventually


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path)


@pytest.fixture
def tokens(pki):
    return pki.folder / "tokens"


@pytest.fixture
def running(tmp_path, pki, tokens):
    tokens.write_text("")
    with ExitStack() as stack:
        (tmp_path / "pool").mkdir()
        pool = Pool(tmp_path / "pool", stack)
        tls = {"tls-dir": pki.folder, "tls-tokens": tokens}
        pool.start_meta(**{"expected-nodes": 1, "token-port": 0, **tls})
        pool.start_node("n0", **tls)
        yield pool


class Traffic(threading.Thread):
    """Stores and loads until it is stopped; ``failures`` has all that was not as it should be."""

    def __init__(self, uri, tls):
        super().__init__()
        self._uri, self._tls = uri, tls
        self.rounds, self.failures, self._stop_now = 0, [], threading.Event()

    def run(self):
        written = random_blocks(np.random.default_rng(3), 8)
        with kvpool.connect(self._uri, transports=["tcp"], tls=self._tls) as client:
            blocks = open_blocks(client)
            while not self._stop_now.is_set():
                chain, loaded = random_chain(8), blank(8)
                stored = blocks.store(chain, written).stored
                result = blocks.load(chain, loaded)
                if (stored, result.loaded) != (8, 8) or not (loaded == written).all():
                    self.failures.append((stored, result))
                client.status()  # over gRPC
                self.rounds += 1

    @contextmanager
    def goes_on(self):
        self.start()
        try:
            yield
        finally:
            self._stop_now.set()
            self.join()

    def more(self):
        """Wait for some rounds that begin from now on."""
        seen = self.rounds
        eventually(lambda: self.rounds > seen + 3 or not self.is_alive())


def shown_by(pki, uri):
    with pki.dial(uri, "client") as secured:
        return secured.getpeercert()["serialNumber"]


def test_certificates_are_replaced_under_traffic(running, pki):
    uris = [running.uri, running.meta_ready["framed"], running.ready["n0"]["data"], running.ready["n0"]["grpc"]]
    before = [shown_by(pki, uri) for uri in uris]
    traffic = Traffic(running.uri, kvpool.TlsSettings(dir=pki.folder))

    with traffic.goes_on():
        for _ in range(2):  # the second time channels are closed that were made before the first
            traffic.more()
            for name, identity in {"meta": META, "node-n0": node_identity("n0")}.items():
                pki.issue(name, identity)
            pki.issue("client", "kvpool://client/acme/engine")
            traffic.more()
        after = [shown_by(pki, uri) for uri in uris]
        with kvpool.connect(running.uri, tls=kvpool.TlsSettings(dir=pki.folder)) as another:
            assert another.status(reach=True).nodes[0].state == "ready"

    assert traffic.failures == []
    assert (running.directory / "meta.log").read_text().count("node_joined") == 1
    assert traffic.rounds > 12
    assert set(before).isdisjoint(after)
    assert [len(set(before)), len(set(after))] == [2, 2]


def test_files_that_cannot_be_used_change_nothing(running, pki):
    uri = running.meta_ready["framed"]
    before = shown_by(pki, uri)

    (pki.folder / "meta.pem").write_text("half a fi")
    assert shown_by(pki, uri) == before
    pki.issue("meta", node_identity("n0"))  # somebody else's
    assert shown_by(pki, uri) == before
    log = (running.directory / "meta.log").read_text()
    assert "holds no certificate in PEM" in log
    assert "they are of kvpool://node/n0, not kvpool://meta" in log

    pki.issue("meta", META)
    assert shown_by(pki, uri) != before


def test_a_token_is_given_and_taken_back(running, pki, tokens):
    token = new_token()
    credentials = kvpool.TlsSettings(ca=pki.ca, token=token)

    with pytest.raises(kvpool.AuthenticationError, match="nobody's here"):
        kvpool.connect(running.meta_ready["for_tokens"], tls=credentials)
    tokens.write_text(f"{token_digest(token)} kvpool://client/acme/engine")
    with kvpool.connect(running.meta_ready["for_tokens"], tls=credentials) as client:
        assert client.status(reach=True).nodes[0].transport == "shm"
        tokens.write_text("")
        with pytest.raises(kvpool.AuthenticationError, match="nobody's here"):
            client.status()
        peer = client.credentials.toward(META)
        with pytest.raises(kvpool.AuthenticationError, match="nobody's here"):
            Connection(running.meta_ready["framed"], "me", LONG_S, peer)
