"""Engines that tests share, with a pool each part of which can be broken, and is whole again before the next test."""

import itertools
import socket
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

import kvpool
from kvpool.bench.vllm_model import BLOCK_TOKENS, DEMO_MODEL, prompt_of, write_model, write_weights
from kvpool.core.errors import KvpoolError
from kvpool.core.namespace import parse_namespace
from tests.integration.conftest import Pool
from tests.vllm.engines import Answer, Engine, soon

BLOCK_BYTES = BLOCK_TOKENS * DEMO_MODEL.kv_bytes_per_token
NODE_BYTES = 64 << 20
ENGINE = {
    "block_size": BLOCK_TOKENS,
    "dtype": DEMO_MODEL.dtype,
    "kv_cache_memory_bytes": 128 << 20,
    "max_model_len": 4_096,
    "max_num_batched_tokens": 1_024,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
}
SHORT = {"load_timeout_s": 3, "save_timeout_s": 3, "lease_s": 2, "lookup_timeout_s": 0.5}
"""Settings of the connector: faults are noticed soon."""

META = {"node-ttl": "3s", "reservation-ttl": "5s", "lease-max": "3s"}
"""After a restart the service evicts nothing for as long as leases of its predecessor may run."""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model") / "kvpool-demo", DEMO_MODEL)
    write_weights(folder, DEMO_MODEL)
    return folder


@dataclass
class Cluster:
    """Two engines on one pool, and one that knows of none."""

    pool: Pool
    off: Engine
    tcp: Engine
    shm: Engine
    before_pool: list[tuple[list[int], Answer]] = field(default_factory=list)
    _expected: dict = field(default_factory=dict)

    @property
    def engines(self):
        return (self.tcp, self.shm)

    def expected(self, prompt, max_tokens=8):
        """What an engine without a pool answers."""
        key = (tuple(prompt), max_tokens)
        if key not in self._expected:
            self._expected[key] = self.off.ask(prompt, max_tokens).tokens
        return self._expected[key]

    def check(self, prompt, answer, max_tokens=8):
        assert answer.finish == "length"
        assert answer.tokens == self.expected(prompt, max_tokens)

    def saved(self, engine, prompt, max_tokens=8):
        """Let ``engine`` answer, and wait until the pool has it."""
        answer = engine.ask(prompt, max_tokens)
        engine.wait_saved()
        self.check(prompt, answer, max_tokens)
        return answer

    def status(self):
        with kvpool.connect(self.pool.uri, transports=["shm"]) as client:
            return client.status()

    def bytes_of(self, key):
        """A block of the engines' namespace, read by a client of the tests' own."""
        with kvpool.connect(self.pool.uri, transports=["shm"]) as client:
            document = next(d for d in client.status().namespaces.values() if '"reset"' not in d and "filler" not in d)
            keyspace = client.namespace(parse_namespace(document.encode()))
            block = np.zeros((1, BLOCK_BYTES), np.uint8)
            assert keyspace.load(bytes.fromhex(key), block).loaded == 1
            return block[0]

    def fill(self):
        """Store other blocks until none of the engines' is left: for a while after a restart nothing is evicted."""
        with kvpool.connect(self.pool.uri, transports=["shm"]) as client:
            space = kvpool.Namespace(model="filler", block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
            keyspace = client.namespace(space)
            rng = np.random.default_rng()

            def filled():
                left = 2 * NODE_BYTES // BLOCK_BYTES
                while left > 0:
                    chain = [rng.bytes(32) for _ in range(16)]
                    stored = keyspace.store(chain, np.ones((16, BLOCK_BYTES), np.uint8)).stored
                    if not stored:
                        return False
                    left -= stored
                return True

            soon(filled, "the pool takes as many blocks as it has room for")

    def heal(self):
        """Every part runs, and both engines use the pool again."""
        self.pool.whole()
        soon(self._is_ready, "two nodes are ready")
        for engine in self.engines:
            soon(lambda engine=engine: self._saves_again(engine), "the engine saves again")

    def check_pool_idle(self):
        """Leases and reservations are released, or run out; nothing else holds room."""
        soon(lambda: self.held() == (0, 0), "no leases, no reservations")

    def held(self):
        """Leases and reservations."""
        counters = self.status().counters
        return counters["leases"], counters["reservations"]

    def _is_ready(self):
        try:
            nodes = self.status().nodes
        except KvpoolError:
            return False
        return sum(node.state == "ready" for node in nodes) == 2

    def _saves_again(self, engine):
        before = engine.count("save_blocks")
        engine.ask(prompt_of(next(_seeds), 2 * BLOCK_TOKENS, DEMO_MODEL.vocabulary), 1)
        engine.wait_saved()
        return engine.count("save_blocks") == before + 2


_seeds = itertools.count(1 << 32)


class BreakablePool(Pool):
    """A pool whose parts come back where they were."""

    def prepare(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.grpc_port = probe.getsockname()[1]
        self.uri = f"grpc://127.0.0.1:{self.grpc_port}"

    def whole(self):
        if self.meta is None:
            self.start_meta(**META)
        for name in ("n0", "n1"):
            if name not in self.nodes:
                self.start_node(name, str(NODE_BYTES))

    def kill_meta(self):
        meta, self.meta = self.meta, None
        self.kill(meta)

    def kill_node(self, name):
        self.kill(self.nodes.pop(name))


@pytest.fixture(scope="session")
def healthy_cluster(model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        pool = BreakablePool(tmp_path_factory.mktemp("pool"), stack)
        pool.prepare()

        def engine(name, **options):
            started = Engine(model, logs / f"{name}.log", **ENGINE, **options)
            stack.callback(started.close)
            return started

        step = {"KVPOOL_PROBE_LOAD_STEP": str(2 * BLOCK_BYTES)}
        cluster = Cluster(
            pool,
            engine("off"),
            engine("tcp", pool={"pool": pool.uri, "transports": ["tcp"], **SHORT}, environ=step),
            engine("shm", pool={"pool": pool.uri, "transports": ["shm"], **SHORT}, environ=step),
        )
        stack.callback(lambda: [each.quit() for each in (cluster.off, *cluster.engines)])  # all end at once
        for each in (cluster.off, *cluster.engines):
            each.wait_ready()
        for seed, each in enumerate(cluster.engines):
            prompt = prompt_of(seed, 100, DEMO_MODEL.vocabulary)
            cluster.before_pool.append((prompt, each.ask(prompt)))
        pool.whole()
        yield cluster


@pytest.fixture
def cluster(healthy_cluster):
    for engine in healthy_cluster.engines:
        engine.reset()
    healthy_cluster.heal()
    return healthy_cluster


@pytest.fixture
def prompt(request):
    """Makes prompts of some length that no other test has."""
    seeds = itertools.count(zlib.crc32(request.node.nodeid.encode()) << 8)
    return lambda tokens: prompt_of(next(seeds), tokens, DEMO_MODEL.vocabulary)
