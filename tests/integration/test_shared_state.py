"""Several metadata services over one Redis: one of them dies, or Redis does, and nobody reads a wrong byte."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from redis_servers import RedisCluster, RedisServer, Watched

import kvpool
from kvpool.bench.process import RoleProcess
from kvpool.core.directory import MissReason
from kvpool.meta import MetaServer
from kvpool.ops.settings import MetaSettings
from kvpool.ops.version import __version__
from tests.http_pages import ask
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually


@dataclass
class SharedPool(Pool):
    """Services that share their state, by the name of each."""

    state: str = ""
    services: dict[str, RoleProcess] = field(default_factory=dict)
    uris: dict[str, str] = field(default_factory=dict)

    def start_service(self, name: str, **options: object) -> None:
        self.grpc_port = 0
        self.start_meta(**{"state": self.state, "expected-nodes": 1, "heartbeat": 0.3, **options})
        self.services[name], self.uris[name] = self.meta, self.uri
        self.uri = ",".join(self.uris.values())

    def kill_service(self, name: str) -> None:
        self.kill(self.services.pop(name))

    def client_of(self, name: str) -> kvpool.Client:
        return self.stack.enter_context(kvpool.connect(self.uris[name], transports=["shm"]))


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def shared_pool(tmp_path: Path, stack: ExitStack, redis_server: RedisServer) -> SharedPool:
    """Two services and a node."""
    pool = SharedPool(tmp_path, stack, state=redis_server.url)
    pool.start_service("a")
    pool.start_service("b")
    pool.start_node("n0", "16MiB")
    return pool


def stored(blocks: kvpool.Keyspace, rng: np.random.Generator, count: int = 40) -> tuple[list[bytes], np.ndarray]:
    chain, content = random_chain(count), random_blocks(rng, count)
    assert blocks.store(chain, content).stored == count
    return chain, content


def assert_there(blocks: kvpool.Keyspace, chain: list[bytes], content: np.ndarray) -> None:
    assert blocks.match(chain).blocks == len(chain)
    buffers = blank(len(chain), content.shape[1])
    assert blocks.load(chain, buffers).loaded == len(chain)
    assert (buffers == content).all()


def is_there(blocks: kvpool.Keyspace, chain: list[bytes], content: np.ndarray) -> bool:
    """Whether all of it can be loaded; whatever is loaded must be right."""
    buffers = blank(len(chain), content.shape[1])
    loaded = blocks.load(chain, buffers).loaded
    assert (buffers[:loaded] == content[:loaded]).all()
    return loaded == len(chain)


def test_a_service_dies_and_its_node_and_clients_go_to_the_other(shared_pool, rng):
    pool = shared_pool
    blocks = open_blocks(pool.connect(timeout_s=5.0))
    chain, content = stored(blocks, rng)
    assert_there(pool.client_of("b").namespace(blocks.namespace), chain, content)
    status = pool.client_of("b").status()
    assert {server.address for server in status.servers} == {u.removeprefix("grpc://") for u in pool.uris.values()}
    assert status.state.primaries == 1
    assert status.nodes[0].version == __version__

    pool.kill_service("a")
    eventually(lambda: is_there(blocks, chain, content))  # a miss at worst, until its node has dialled the other
    assert_there(blocks, chain, content)
    more, more_content = random_chain(40), random_blocks(rng, 40)
    eventually(lambda: _stores(blocks, more, more_content))  # nodes take writes of the service that is left
    assert_there(blocks, chain, content)
    assert_there(blocks, more, more_content)
    assert pool.client_of("b").status().counters["blocks"] == len(chain) + len(more)
    with pytest.raises(kvpool.UsageError, match="does not copy blocks between nodes yet"):
        pool.client_of("b").drain("n0")
    page = ask(pool.meta_ready["http"], "/")
    assert (page.status, "meta.state is set" in page.text) == (501, True)


def test_a_redis_that_drops_keys_by_itself_is_refused(redis_server):
    redis_server.client.config_set("maxmemory", "100mb")
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(kvpool.SettingsError, match="noeviction"):
        MetaServer(MetaSettings(state=redis_server.url))


def test_redis_dies_and_comes_back_with_what_it_knew_long_ago_and_then_empty(shared_pool, redis_server, rng):
    """What it says of then is looked at by nobody: nodes say what there is now."""
    pool = shared_pool
    blocks = open_blocks(pool.connect(timeout_s=5.0))
    old, _ = stored(blocks, rng, 200)
    redis_server.client.save()
    kept = [stored(blocks, rng, 100) for _ in range(2)]  # which evicts some of the old ones
    assert blocks.match(old).blocks < len(old)
    epoch = pool.client_of("a").status().state.epoch

    redis_server.kill()
    assert {blocks.match(old).blocks for _ in range(20)} == {0}
    assert blocks.match(old).reason in {MissReason.RECOVERING, MissReason.OVER_DEADLINE}
    assert blocks.load(old, blank(len(old))).loaded == 0

    again = restart(pool, redis_server)
    assert again.client.dbsize()
    for chain, content in kept:
        eventually(lambda chain=chain: blocks.match(chain).blocks == len(chain))
        assert_there(blocks, chain, content)
    left = blocks.match(old).blocks
    assert left < len(old)
    assert blocks.load(old[: left + 1], blank(left + 1)).loaded == left
    assert pool.client_of("a").status().state.epoch != epoch
    eventually(lambda: len(epochs(again)) == 1)

    again.kill()
    (again.folder / "dump.rdb").unlink()
    restart(pool, again)
    for chain, content in kept:
        eventually(lambda chain=chain: blocks.match(chain).blocks == len(chain))
        assert_there(pool.client_of("b").namespace(blocks.namespace), chain, content)


def test_a_replica_takes_over(tmp_path, stack, rng):
    """It may have lost writes: nodes say anew what they hold."""
    watched = Watched(tmp_path / "redis")
    stack.callback(watched.kill)
    pool = SharedPool(tmp_path, stack, state=watched.url)
    pool.start_service("a")
    pool.start_node("n0", "8MiB")
    client = pool.connect(timeout_s=5.0)
    blocks = open_blocks(client)
    chain, content = stored(blocks, rng)
    state = client.status().state
    assert state.replicas == 1

    watched.primary.kill()
    eventually(lambda: blocks.match(chain).blocks == len(chain))
    assert_there(blocks, chain, content)
    later = client.status().state
    assert later.epoch != state.epoch
    assert later.replicas == 0


def test_a_cluster_holds_namespaces_on_its_masters(tmp_path, stack, rng):
    cluster = RedisCluster(tmp_path / "cluster", 3)
    stack.callback(cluster.kill)
    pool = SharedPool(tmp_path, stack, state=cluster.url)
    pool.start_service("a")
    pool.start_node("n0", "8MiB")
    client = pool.connect()
    some = [open_blocks(client, model=f"model-{i}") for i in range(6)]
    content = [stored(blocks, rng, 10) for blocks in some]
    for blocks, (chain, expected) in zip(some, content, strict=True):
        assert_there(blocks, chain, expected)
    assert sum(server.client.dbsize() > 0 for server in cluster.servers) > 1
    latest = [stored(blocks, rng, 20)[0] for blocks in some]  # full: the oldest leaves go, whichever namespace's
    assert [blocks.match(chain).blocks for blocks, chain in zip(some, latest, strict=True)] == [20] * 6
    assert client.status().counters["evicted_blocks"] > 0


def _stores(blocks: kvpool.Keyspace, chain: list[bytes], content: np.ndarray) -> bool:
    result = blocks.store(chain, content)
    return result.stored + result.existing == len(chain)


def restart(pool: SharedPool, server: RedisServer) -> RedisServer:
    again = RedisServer(server.folder, port=server.port)
    pool.stack.callback(again.kill)
    return again


def epochs(server: RedisServer) -> set[bytes]:
    """The epochs that keys are of."""
    parts = [key.replace(b"{pool}:", b"").split(b":") for key in server.client.scan_iter("kvpool:*", count=1000)]
    return {part[1] for part in parts} - {b"epoch"}
