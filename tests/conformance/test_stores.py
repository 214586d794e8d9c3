"""Every store keeps what `Directory` promises: the same machine drives the one in memory and the one in Redis."""

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from property.directory_model import NAMESPACES, PARENTS, DirectoryModel
from property.inspect_directory import Evictions, Views
from property.test_directory import DirectoryMachine
from redis_servers import RedisServer

from kvpool.core.clock import microseconds
from kvpool.core.directory import MissReason
from kvpool.core.namespace import Namespace
from kvpool.meta.store import matching
from kvpool.meta.store.link import RedisLink
from kvpool.meta.store.memory import open_memory_store
from kvpool.meta.store.pool import current_epoch
from kvpool.meta.store.redis import RedisStore
from kvpool.testing import ManualClock

from .redis_tables import all_views, check_integrity

FAR_FUTURE_S = 4e9
"""Time in Redis never runs backwards: set far ahead, it moves only when a test says so."""


class CheckedRedisStore(RedisStore):
    """A store whose namespaces' clocks are a test's."""

    clock: ManualClock

    def open_namespace(self, namespace: Namespace) -> None:
        super().open_namespace(namespace)
        self.set_clock()

    def set_clock(self) -> None:
        for namespace in self.pool.all_known():
            key = self.epoch.prefix(namespace.namespace.id) + "ns"
            self.link.run([("HSET", key, "clock", microseconds(self.clock()))])

    def check_integrity(self) -> None:
        check_integrity(self)


class RedisClock(ManualClock):
    store: CheckedRedisStore

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.store.set_clock()


class StoreModel(DirectoryModel):
    """The directory's model, for stores that only have a store's methods."""

    def open_copies(self):
        return []

    def reasons(self, namespace: Namespace) -> dict[bytes, MissReason | None]:
        """Why each block cannot be matched."""
        return {block_hash: self.directory.explain(namespace.id, block_hash) for block_hash in PARENTS}


class MemoryModel(StoreModel):
    def open_directory(self):
        return open_memory_store(self.clock, self.config)


class RedisModel(StoreModel):
    link: RedisLink

    def open_directory(self):
        self.link.run([("FLUSHALL",)])
        epoch = current_epoch(self.link, lambda length: bytes([7]) * length)
        store = CheckedRedisStore(self.link, epoch, self.config)
        store.usage.pressure_s = 0.0
        self.clock = store.clock = RedisClock(FAR_FUTURE_S)
        store.clock.store = store
        return store

    def views(self) -> Views:
        return all_views(self.directory)

    def reasons(self, namespace):
        (said,) = self.link.calls([(self.directory.epoch.prefix(namespace.id), "why", [b"".join(PARENTS)])])
        return {h: self.directory._reason(reason) for h, reason in zip(PARENTS, said, strict=True)}

    def check_order(self, evictions: Evictions) -> None:
        """Each namespace gives up its own oldest first; between two of them the order is not exact."""
        for namespace in NAMESPACES.values():
            before, after = (
                {key: block for key, block in views.items() if key[0] == namespace.id}
                for views in (evictions.before, evictions.after)
            )
            rewritten = {key for key in evictions.rewritten if key[0] == namespace.id}
            own = Evictions(before, after, rewritten, evictions.spared, evictions.may_go, evictions.tenant_of)
            own.check_oldest_went_first(self.now_us(), self.config.age_slack)

    def nothing_could_go(self, namespace: Namespace, spared, after: Views) -> None:
        """What is refused found no leaf of its own namespace; others gave what they were asked for, once."""
        own = {key for key, block in after.items() if key[0] == namespace.id and self._may_go(block)}
        assert own <= {spared}

    def check_matched(self, blocks: int, expected: int, lease_s: float, leased_bytes: int) -> None:
        """Past the cap, which each namespace has its part of, a match is shorter."""
        stats = self.directory.stats()
        if lease_s and stats.used_bytes > self.config.pressure * stats.capacity_bytes:
            assert blocks <= expected
        else:
            assert blocks == expected


class StoreMachine(DirectoryMachine):
    """All of the directory's rules but those of copies between nodes, which a store need not make."""

    replicate = copy_all = drain = fetch = give_up = None  # type: ignore[assignment]
    model: type[StoreModel] = MemoryModel

    def make_pool(self) -> DirectoryModel:
        return self.model(self.age_slack, with_disks=False, policy="lru", namespaces=NAMESPACES)

    @invariant()
    def says_visible_what_nodes_hold_up_to_the_root(self) -> None:
        for namespace in NAMESPACES.values():
            visible = self.pool.visible(namespace)
            in_flight = {h for write in self.pool.open if write.namespace is namespace for h in write.in_flight}
            reasons = self.pool.reasons(namespace)
            assert {h for h, reason in reasons.items() if reason is None} == visible
            assert {h for h, reason in reasons.items() if reason == MissReason.IN_FLIGHT} == in_flight
            some = min(reasons)
            assert self.directory.explain_block(namespace.id, some).reason == reasons[some]


class RedisMachine(StoreMachine):
    model = RedisModel
    tells_followers_what_is_visible = None  # type: ignore[assignment] - a service that shares its state tells nobody

    def follow(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    RedisModel.link = RedisLink(server.url, 5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "DENSE_BLOCKS", 1)  # so that short chains are asked for like long ones
        yield server
    RedisModel.link.close()
    server.kill()


TestMemoryStore = pytest.mark.timeout(300)(StoreMachine.TestCase)
TestMemoryStore.settings = settings(max_examples=10)
TestRedisStore = pytest.mark.timeout(300)(RedisMachine.TestCase)
TestRedisStore.settings = settings(max_examples=12, stateful_step_count=30)
