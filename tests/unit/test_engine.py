"""The reference engine, its prefix cache and the order of requests, over a pool that is a dictionary."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.bench.demo import DemoSettings, Turns, serve_all
from kvpool.bench.engine import BATCH_BLOCKS, Engine, EngineStats, PageCache, PagedBuffer
from kvpool.bench.hitrate import ideal_hit_rate, private_hit_rate
from kvpool.bench.workload import AgentSettings, Request, Workload, agent_workload
from kvpool.core.errors import UnavailableError, UsageError
from kvpool.core.keys import split_hashes

BLOCK_TOKENS = 16
BLOCK_BYTES = 256
AGENTS = agent_workload(AgentSettings(agents=2, conversations=8, turns=6, system_tokens=200, turn_tokens=60, seed=5))


@dataclass
class Answer:
    """What any call of the pool answers, as far as engines read it."""

    blocks: int = 0
    loaded: int = 0
    stored: int = 0
    refused: int = 0
    missing_from: int | None = None


@dataclass
class DictPool:
    """A pool in one dictionary, prefix-closed like the real one; ``deliver`` may change what it delivers."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)
    deliver: Callable[[bytes], bytes] = lambda payload: payload
    deliver_max: int = 1 << 30
    keeps: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    most_blocks: int = 0

    def match(self, hashes: bytes, *, lease_s: float) -> Answer:
        with self.lock:
            return Answer(blocks=self._leading(split_hashes(hashes)))

    def load(self, hashes: bytes, buffers, *, first: int) -> Answer:
        with self.lock:
            self.most_blocks = max(self.most_blocks, len(buffers))
            end = min(self._leading(split_hashes(hashes)), first + len(buffers), first + self.deliver_max)
            for block, pieces in zip(split_hashes(hashes)[first:end], buffers, strict=False):
                payload = self.deliver(self.blocks[block])
                for piece in pieces:
                    piece[:], payload = payload[: len(piece)], payload[len(piece) :]
            return Answer(loaded=max(0, end - first))

    def store(self, hashes: bytes, buffers, *, first: int) -> Answer:
        with self.lock:
            self.most_blocks = max(self.most_blocks, len(buffers))
            chain = split_hashes(hashes)
            held = self._leading(chain)
            if held < first:
                return Answer(refused=len(buffers), missing_from=held)
            new = {
                block: b"".join(pieces)
                for block, pieces in zip(chain[first:], buffers, strict=False)
                if block not in self.blocks
            }
            if self.keeps:
                self.blocks |= new
            return Answer(stored=len(new))

    def _leading(self, chain: list[bytes]) -> int:
        return next((i for i, block in enumerate(chain) if block not in self.blocks), len(chain))


def chain(*names: int) -> tuple[bytes, ...]:
    """Hashes that stand for a chain: the first ``i`` names decide the ``i``-th."""
    return tuple(bytes(names[: i + 1]).rjust(16, b"\xff") * 2 for i in range(len(names)))


def request(*names: int, tail: int = 0) -> Request:
    return Request(len(names) * BLOCK_TOKENS + tail, chain(*names))


def engine(pool: DictPool, pages: int = 8) -> Engine:
    return Engine(pages, BLOCK_BYTES, BLOCK_TOKENS, pool)


def test_what_one_engine_computed_another_loads_and_finds_right():
    pool = DictPool()
    writer, reader = engine(pool), engine(pool)

    writer.serve(request(1, 2, 3))
    reader.serve(request(1, 2, 4, tail=5))

    assert writer.stats().computed_tokens == 48
    stats = reader.stats()
    assert (stats.local_tokens, stats.pool_tokens, stats.computed_tokens) == (0, 32, 21)
    assert (stats.loaded_blocks, stats.loaded_bytes) == (2, 512)
    assert (stats.stored_blocks, stats.stored_bytes) == (1, 256)
    assert stats.mismatches == 0


def test_the_local_prefix_is_not_loaded_again():
    pool = DictPool()
    one, two = engine(pool), engine(pool)

    one.serve(request(1, 2))
    two.serve(request(1, 2, 3, 4))
    one.serve(request(1, 2, 3, 4, 5))

    stats = one.stats()
    assert (stats.local_tokens, stats.pool_tokens, stats.loaded_blocks) == (32, 32, 2)
    assert stats.hit_rate == pytest.approx(64 / 112)


def flip(payload: bytes, at: int) -> bytes:
    return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]


@pytest.mark.parametrize("at", [0, 127, 128, 255])
def test_one_wrong_bit_anywhere_is_a_mismatch_and_the_block_is_computed(at):
    pool = DictPool()
    engine(pool).serve(request(1, 2, 3))
    pool.deliver = lambda payload: flip(payload, at)

    reader = engine(pool)
    reader.serve(request(1, 2, 3))

    stats = reader.stats()
    assert (stats.mismatches, stats.pool_tokens, stats.computed_tokens) == (3, 0, 48)
    # and what it holds now is right: with its own pool it would give back what the writer stored
    other = DictPool()
    reader._pool = other
    reader.serve(request(1, 2, 3, 4))
    assert {k: v for k, v in other.blocks.items() if k in pool.blocks} == pool.blocks


def test_the_right_bytes_of_another_block_are_a_mismatch():
    pool = DictPool()
    engine(pool).serve(request(1, 2))
    first, second = chain(1, 2)
    pool.blocks[first], pool.blocks[second] = pool.blocks[second], pool.blocks[first]

    reader = engine(pool)
    reader.serve(request(1, 2))

    assert reader.stats().mismatches == 2


def test_swapped_pieces_are_a_mismatch():
    pool = DictPool()
    engine(pool).serve(request(1))
    pool.deliver = lambda payload: payload[128:] + payload[:128]

    reader = engine(pool)
    reader.serve(request(1))

    assert reader.stats().mismatches == 1


def test_a_partial_load_counts_only_what_arrived_and_the_rest_is_computed():
    pool = DictPool()
    engine(pool).serve(request(1, 2, 3, 4))
    pool.deliver_max = 3

    reader = engine(pool)
    reader.serve(request(1, 2, 3, 4))

    stats = reader.stats()
    assert (stats.pool_tokens, stats.computed_tokens, stats.undelivered_blocks) == (48, 16, 1)


def test_ancestors_that_the_pool_lost_are_stored_again_from_the_local_cache():
    pool = DictPool()
    one = engine(pool)
    one.serve(request(1, 2))
    pool.blocks.clear()

    one.serve(request(1, 2, 3))

    assert set(pool.blocks) == set(chain(1, 2, 3))


def test_long_chains_go_in_batches():
    pool = DictPool()
    blocks = 2 * BATCH_BLOCKS + 3
    long = Request(blocks * BLOCK_TOKENS, tuple(i.to_bytes(16, "little") * 2 for i in range(blocks)))

    one, two = engine(pool, blocks), engine(pool, blocks)
    one.serve(long)
    two.serve(long)

    assert pool.most_blocks == BATCH_BLOCKS
    assert one.stats().stored_blocks == two.stats().loaded_blocks == blocks
    assert two.stats().computed_tokens == two.stats().mismatches == 0


def test_a_prompt_without_a_full_block_is_computed_and_leaves_the_pool_alone():
    one = engine(DictPool())

    one.serve(Request(5, ()))

    assert (one.stats().requests, one.stats().computed_tokens) == (1, 5)


def test_a_prompt_longer_than_the_engine_s_memory_is_refused():
    with pytest.raises(UsageError, match="3 blocks needs as many pages; the engine has 2"):
        engine(DictPool(), pages=2).serve(request(1, 2, 3))


@pytest.mark.parametrize("block_bytes", [0, 8, 24, 100, 1 << 31])
def test_block_bytes_that_cannot_be_halved_into_words_are_refused(block_bytes):
    with pytest.raises(UsageError, match=f"block bytes are {block_bytes}"):
        PagedBuffer(1, block_bytes)


class LeafFirstModel:
    """The obvious cache: a last use for every block; the oldest block without a resident child goes."""

    def __init__(self, pages: int) -> None:
        self.pages, self.clock = pages, 0
        self.last_use: dict[bytes, int] = {}
        self.parent: dict[bytes, bytes | None] = {}

    def match(self, hashes) -> int:
        return next((i for i, block in enumerate(hashes) if block not in self.last_use), len(hashes))

    def admit(self, hashes) -> None:
        missing = len(hashes) - self.match(hashes)
        while len(self.last_use) + missing > self.pages:
            parents = {self.parent[block] for block in self.last_use}
            leaves = [block for block in self.last_use if block not in parents and block not in hashes]
            del self.last_use[min(leaves, key=self.last_use.__getitem__)]
        self.clock += 1
        for parent, block in zip((None, *hashes), hashes, strict=False):
            self.last_use[block], self.parent[block] = self.clock, parent


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60), st.integers(6, 14))
def test_page_cache_evicts_as_leaf_first_lru_and_never_loses_a_page(prompts, pages):
    cache, model = PageCache(pages), LeafFirstModel(pages)
    for names in prompts:
        hashes = chain(*names)
        assert model.match(hashes) == cache.match(hashes)
        given_pages = cache.admit(hashes)
        model.admit(hashes)
        assert len(set(given_pages)) == len(hashes) == cache.match(hashes)
        cache.check_integrity()


def test_engines_without_a_pool_reach_the_rate_counted_for_private_caches():
    pages = 2 * AGENTS.longest_blocks
    engines = [engine(DictPool(keeps=False), pages) for _ in range(3)]

    serve_all(AGENTS, engines, lambda: None)

    totals = sum((e.stats() for e in engines), EngineStats())
    assert totals.pool_tokens == 0
    assert totals.hit_rate == pytest.approx(private_hit_rate(AGENTS, 3, pages))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_engines_with_one_pool_reach_the_ideal_rate_exactly_and_nobody_computes_twice(number):
    pool = DictPool()
    engines = [engine(pool, AGENTS.longest_blocks) for _ in range(number)]
    served: list[None] = []

    serve_all(AGENTS, engines, lambda: served.append(None))

    totals = sum((e.stats() for e in engines), EngineStats())
    assert totals.hit_rate == pytest.approx(ideal_hit_rate(AGENTS), abs=1e-12)
    assert totals.stored_blocks == AGENTS.unique_blocks() == len(pool.blocks)
    assert (totals.mismatches, totals.undelivered_blocks) == (0, 0)
    assert len(served) == totals.requests == len(AGENTS.requests)


def test_a_request_waits_for_the_one_that_brought_its_deepest_known_block():
    turns = Turns(Workload("", 16, (request(1), request(1, 2), request(9), request(1, 2, 3))))

    assert turns.wait(0)
    assert turns.wait(2)  # shares nothing
    turns.finish(0)
    assert turns.wait(1)
    turns.finish(1)
    assert turns.wait(3)


def test_a_waiting_request_goes_on_only_when_its_turn_comes():
    turns = Turns(Workload("", 16, (request(1), request(1, 2))))
    went_on = threading.Event()
    waiting = threading.Thread(target=lambda: turns.wait(1) and went_on.set())
    waiting.start()

    assert not went_on.is_set()
    turns.finish(0)
    waiting.join(10)

    assert went_on.is_set()


def test_an_engine_s_error_ends_the_run_and_is_raised():
    class BrokenPool(DictPool):
        def match(self, hashes: bytes, *, lease_s: float) -> Answer:
            raise UnavailableError("the pool went away")

    engines = [engine(BrokenPool(), 100), engine(DictPool(), 100), engine(DictPool(), 100)]

    with pytest.raises(UnavailableError, match="went away"):
        serve_all(AGENTS, engines, lambda: None)


def test_demo_defaults_fit_the_workload():
    fitted = DemoSettings(block_bytes=4_112, nodes=2).fitted(AGENTS)

    assert fitted.engine_pages == 2 * AGENTS.longest_blocks
    assert fitted.node_bytes is not None
    assert fitted.node_bytes * 2 >= AGENTS.unique_blocks() * 8_192


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"engines": 0}, "engines are 0"),
        ({"nodes": 17}, "nodes are 17"),
        ({"block_bytes": 17}, "block bytes are 17"),
        ({"node_bytes": 8_000}, "nodes of 8000 bytes cannot hold one block"),
        ({"engine_pages": 3}, r"engine pages are 3, but the longest prompt has \d+ blocks"),
    ],
)
def test_demo_settings_that_cannot_be_are_refused(settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        DemoSettings(**settings).fitted(AGENTS)
