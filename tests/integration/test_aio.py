"""The asyncio face of the client: the same results, awaited. And calls that are given up in mid-exchange.

Row 17 of the fault matrix: whoever calls next never gets the reply to a call before it.
"""

import asyncio
import itertools

import numpy as np
import psutil
import pytest

import kvpool
from kvpool.transport.wire.framed import FramedSocket
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually


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


class GivenUpError(BaseException):
    """What no code catches by accident, as asyncio's own cancellation."""


class Plan:
    """Raises at the n-th system call on a connection, before it is made or after."""

    def __init__(self):
        self.left = None
        self.after = False

    def give_up_at(self, number, *, after):
        self.left, self.after = number, after

    def around(self, call):
        if self.left is None:
            return call()
        self.left -= 1
        if self.left == 0 and not self.after:
            raise GivenUpError
        result = call()
        if self.left == 0:
            raise GivenUpError
        return result


class GivenUpSocket:
    """A socket whose every exchange may end anywhere."""

    def __init__(self, sock, plan):
        self._sock, self._plan = sock, plan

    def __getattr__(self, name):
        method = getattr(self._sock, name)
        if name not in ("sendall", "sendmsg", "recv_into", "recvmsg_into", "recvmsg"):
            return method
        return lambda *arguments: self._plan.around(lambda: method(*arguments))


@pytest.fixture
def plan(monkeypatch):
    plan, init = Plan(), FramedSocket.__init__

    def wrapped(self, sock):
        init(self, sock)
        self.sock = GivenUpSocket(sock, plan)

    monkeypatch.setattr(FramedSocket, "__init__", wrapped)
    return plan


def descriptors():
    return psutil.Process().num_fds()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_call_given_up_at_any_point_of_an_exchange_leaves_no_reply_to_the_next_one(pool, rng, plan, transport, after):
    chain, other = random_chain(3), random_chain(2)
    blocks, others = random_blocks(rng, 3), random_blocks(rng, 2)
    before = descriptors()
    client = pool.connect(transport, streams=1)
    keyspace = open_blocks(client)
    keyspace.store(chain, blocks)
    keyspace.store(other, others)
    calls = {
        "match": lambda: keyspace.release(keyspace.match(chain, lease_s=5)),
        "load": lambda: keyspace.load(chain, [list(block.reshape(2, -1)) for block in blank(3)]),
        "store": lambda: keyspace.store(random_chain(3), list(blocks)),
        "reserve": lambda: keyspace.abort(keyspace.reserve(random_chain(3))),
    }
    points = {}

    for name, call in calls.items():
        for number in itertools.count(1):
            plan.give_up_at(number, after=after)
            try:
                call()
            except GivenUpError:
                points[name] = number
            ended, plan.left = plan.left, None
            loaded = blank(2)
            assert keyspace.match(other).blocks == 2
            assert keyspace.load(other, list(loaded)).loaded == 2
            np.testing.assert_array_equal(others, loaded)
            if ended > 0:
                break

    assert points.keys() == calls.keys()
    client.close()
    eventually(lambda: descriptors() <= before)


def test_an_awaited_call_that_is_cancelled_at_any_time_leaves_no_reply_to_the_next_one(pool, rng):
    chain, other = random_chain(4), random_chain(2)
    blocks, others = random_blocks(rng, 4), random_blocks(rng, 2)

    async def run():
        async with await kvpool.connect_async(pool.uri, transports=["tcp"], streams=1) as client:
            name = kvpool.Namespace(model="aio-cancelled", block_tokens=16, block_bytes=BLOCK_BYTES)
            keyspace = await client.namespace(name)
            await keyspace.store(chain, blocks)
            await keyspace.store(other, others)
            deeds = [
                lambda: keyspace.match(chain, lease_s=1),
                lambda: keyspace.load(chain, blank(4)),
                lambda: keyspace.store(random_chain(4), blocks),
                client.status,
            ]
            for deed, turns in itertools.product(deeds, range(12)):
                task = asyncio.ensure_future(deed())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                loaded = blank(2)
                assert (await keyspace.match(other)).blocks == 2
                assert (await keyspace.load(other, loaded)).loaded == 2
                np.testing.assert_array_equal(others, loaded)
                await asyncio.wait([task])

    before = descriptors()
    asyncio.run(run())
    eventually(lambda: descriptors() <= before)
