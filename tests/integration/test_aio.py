"""The asyncio face of the client: the same results, awaited."""

import asyncio

import numpy as np

import kvpool
from tests.integration.conftest import BLOCK_BYTES, blank, random_blocks, random_chain


def test_many_awaited_calls_run_side_by_side(pool, rng):
    chains = [random_chain(4) for _ in range(8)]
    contents = [random_blocks(rng, 4) for _ in chains]
    loaded = [blank(4) for _ in chains]

    async def run():
        async with await kvpool.connect_async(pool.uri, transports=["tcp"]) as client:
            blocks = await client.namespace(kvpool.Namespace(model="aio", block_tokens=16, block_bytes=BLOCK_BYTES))
            stores = await asyncio.gather(*(blocks.store(c, b) for c, b in zip(chains, contents, strict=True)))
            matches = await asyncio.gather(*(blocks.match(chain, lease_s=5) for chain in chains))
            loads = await asyncio.gather(*(blocks.load(c, b) for c, b in zip(chains, loaded, strict=True)))
            await asyncio.gather(*(blocks.release(match) for match in matches))
            return stores, matches, loads, client.stats()

    stores, matches, loads, stats = asyncio.run(run())

    assert [s.stored for s in stores] == [m.blocks for m in matches] == [r.loaded for r in loads] == [4] * 8
    assert stats.loaded_bytes == {"tcp": 32 * BLOCK_BYTES}
    np.testing.assert_array_equal(contents, loaded)
