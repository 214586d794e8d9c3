"""Read grants over a restart of the metadata service: old ones open nothing, and whoever holds them loses nothing."""

from contextlib import ExitStack

import numpy as np
import pytest

import kvpool
from kvpool.core.identities import node_identity
from kvpool.embedded import EmbeddedPool
from kvpool.meta import MetaServer
from kvpool.ops.settings import MetaSettings, NodeSettings
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import ReadReply, ReadRequest
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain
from tests.pki import LONG_S, Pki
from tests.waiting import eventually


@pytest.fixture
def pool(tmp_path):
    """A pool in this process whose service can be replaced: ``pool.restart()``."""
    pki = Pki(tmp_path)
    tls = kvpool.TlsSettings(dir=pki.folder)
    files = {"segment_dir": tmp_path, "unix_socket": tmp_path / "n0.sock", "keep_segment": False}
    node = NodeSettings(node_id="n0", size="4MiB", data_port=0, grpc_port=0, **files)
    with EmbeddedPool(MetaSettings(grpc_port=0, framed_port=0), node, tls=tls) as pool, ExitStack() as later:

        def restart():
            port = int(pool.meta.grpc_address.rpartition(":")[2])
            pool.meta.stop()
            again = MetaServer(pool.meta.settings.model_copy(update={"grpc_port": port}), tls)
            again.start()
            later.callback(again.stop)

        pool.restart, pool.pki = restart, pki
        yield pool


def test_old_grants_open_nothing_after_a_restart_and_cost_nobody_a_block(pool):
    with pool.connect(transports=["tcp"]) as client:
        blocks, chain, written = open_blocks(client), random_chain(4), random_blocks(np.random.default_rng(1), 4)
        assert blocks.store(chain, written).stored == 4
        assert blocks.load(chain, blank(4)).loaded == 4
        _, old = blocks._grants._latest
        [node] = client._meta.topology.nodes

        pool.restart()
        eventually(lambda: blocks.load(chain, blank(4)).loaded == 4)

        peer = pool.pki.credentials("client").toward(node_identity("n0"))
        connection = Connection(f"tls://{pool.nodes[0].data_address}", "me", LONG_S, peer)
        try:
            where = (node.segments[0].segment_id, bytes(4), bytes(8), BLOCK_BYTES)
            with pytest.raises(kvpool.StaleGrantError):
                connection.call(ReadRequest(*where, old[node.incarnation]), ReadReply, LONG_S)
        finally:
            connection.close()
        misses = client.stats().misses
        blocks._grants._latest = (blocks._grants.version, old)
        loaded = blank(4)
        assert blocks.load(chain, loaded).loaded == 4
        assert np.array_equal(loaded, written)
        assert client.stats().misses == misses
