"""What the machine meets seldom, told one by one, of every store."""

import pytest
from fake_node import SHARDED, SmallPool, chain, make_namespace
from redis_servers import RedisServer

from kvpool.core.directory import DirectoryConfig, MissReason, Want
from kvpool.core.errors import InvalidHashError, NamespaceMismatchError, UnknownNamespaceError, UsageError
from kvpool.meta.store.link import RedisLink
from kvpool.meta.store.pool import current_epoch

from .test_stores import FAR_FUTURE_S, CheckedRedisStore, RedisClock


class RedisPool(SmallPool):
    link: RedisLink

    def open_directory(self, config):
        self.link.run([("FLUSHALL",)])
        store = CheckedRedisStore(self.link, current_epoch(self.link, bytes), config or DirectoryConfig())
        store.usage.pressure_s = 0.0
        self.clock = store.clock = RedisClock(FAR_FUTURE_S)
        store.clock.store = store
        return store


@pytest.fixture(scope="module")
def redis_link(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    link = RedisPool.link = RedisLink(server.url, 5.0)
    yield link
    link.close()
    server.kill()


@pytest.fixture(params=["memory", "redis"])
def make_pool(request):
    if request.param == "memory":
        return SmallPool
    request.getfixturevalue("redis_link")
    return RedisPool


def test_dormant_blocks_go_before_visible_ones(make_pool):
    pool = make_pool(5)
    old, young = chain(1), chain(2, 3, 4)
    pool.store(old)
    pool.clock.advance(1)
    pool.store(young)
    pool.lose_block(young[0])  # the two below sleep, younger than what is visible
    pool.clock.advance(1)
    pool.store(chain(5, 6, 7))
    assert pool.visible(old) == [True]
    assert pool.directory.explain(pool.namespace.id, young[2]) == MissReason.EVICTED
    assert pool.directory.explain(pool.namespace.id, young[1]) == MissReason.PARENT_MISSING


def test_what_sleeps_wakes_with_its_parent(make_pool):
    pool = make_pool(8)
    hashes = chain(1, 2, 3, 4)
    pool.store(hashes)
    pool.lose_block(hashes[1])
    assert pool.visible(hashes) == [True, False, False, False]
    pool.store(hashes)
    assert pool.visible(hashes) == [True] * 4


def test_a_block_below_another_parent_is_refused_and_nothing_is_reserved(make_pool):
    pool = make_pool(8)
    pool.store(chain(1, 2))
    with pytest.raises(NamespaceMismatchError, match=r"hashes\[2\] is stored below another parent"):
        pool.reserve([*chain(7, 8), chain(1, 2)[1]])
    assert pool.in_use() == (0, 2 * 4096)


def test_a_ring_is_refused(make_pool):
    pool = make_pool(8)
    a, b = chain(1, 2)
    pool.store([a, b])
    pool.lose_block(a)  # b sleeps below it
    with pytest.raises(NamespaceMismatchError, match="stored below the chain"):
        pool.reserve([a], parent=b)
    assert pool.in_use()[0] == 0


def test_a_freed_block_is_not_taken_for_a_new_one(make_pool):
    pool = make_pool(2)
    pool.store(chain(1))
    pool.store(chain(2))
    (segment,) = pool.segments
    kept = list(segment.held.values())
    pool.clock.advance(1)
    pool.reserve(chain(3))  # whose grant tells the node to free a slot, and never reaches it
    pool.lose(segment.segment_id)
    pool.join(segment)
    assert pool.announce(segment, kept) == [False, True]


def test_an_older_write_does_not_complete_a_newer_one(make_pool):
    pool = make_pool(4)
    first = pool.reserve(chain(1), ttl_s=5.0)
    pool.clock.advance(6)
    second = pool.reserve(chain(1))
    assert second.wants == bytes([Want.WANTED])
    assert [int(status) for status in pool.commit(first, chain(1))] == [1]
    assert [int(status) for status in pool.commit(second, chain(1))] == [0]


def test_all_ranks_must_have_written(make_pool):
    pool = make_pool(8, namespaces=(SHARDED,))
    hashes = chain(1, 2)
    reserved = pool.reserve(hashes)
    pool.commit_share(reserved, 0, 0, hashes)
    assert pool.visible(hashes) == [False, False]
    pool.commit_share(reserved, 0, 1, hashes)
    assert pool.visible(hashes) == [True, True]


def test_a_full_pool_gives_to_whoever_is_new_what_is_oldest_in_any_namespace(make_pool):
    one, other = make_namespace(model="one"), make_namespace(model="other")
    pool = make_pool(4, namespaces=(one, other))
    pool.store(chain(1, 2, 3, 4), one)
    pool.clock.advance(1)
    pool.store(chain(5), other)
    assert pool.visible(chain(1, 2, 3, 4), one) == [True, True, True, False]
    pool.clock.advance(1)
    pool.store(chain(6), one)
    assert pool.visible(chain(5), other) == [True]


def test_bad_input_is_named(make_pool):
    pool = make_pool(4)
    with pytest.raises(InvalidHashError, match="stands twice"):
        pool.reserve([chain(1)[0]] * 2)
    with pytest.raises(InvalidHashError, match="first is 5"):
        pool.directory.match(pool.namespace.id, chain(1)[0], 5)
    with pytest.raises(UnknownNamespaceError):
        pool.directory.match(bytes(32), chain(1)[0])
    with pytest.raises(UsageError, match="is open already"):
        pool.join(pool.segments[0])
