"""Bytes over UCX between real processes."""

import numpy as np
import pytest

import kvpool
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain

pytest.importorskip("nixl_cu12", reason="needs NIXL")


@pytest.fixture(autouse=True)
def tcp_underneath(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def pool(start_pool):
    pool = start_pool(nodes=0)
    pool.start_node("n0", "256MiB", ucx=True)
    return pool


def test_another_client_loads_what_one_stored(pool, rng):
    chain, blocks, loaded = random_chain(20), random_blocks(rng, 20), blank(20)
    writer = open_blocks(pool.connect("ucx"), model="shared")
    reader = open_blocks(pool.connect("ucx"), model="shared")

    stored = writer.store(chain, list(blocks))
    result = reader.load(chain, list(loaded))

    assert stored == kvpool.StoreResult(stored=20, size_bytes=20 * BLOCK_BYTES)
    assert (result.loaded, result.size_bytes) == (20, 20 * BLOCK_BYTES)
    np.testing.assert_array_equal(blocks, loaded)
