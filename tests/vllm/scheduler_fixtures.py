"""Pools and engines for the scheduler-level tests; conftest.py hands them out."""

import itertools
import json
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool_connector.vllm import connector as connector_module
from tests.integration.conftest import Pool
from tests.vllm.scheduling import STUCK_S, Engine
from tests.vllm.shapes import Shape

OUR_THREADS = ("kvpool", "framed")

_names = itertools.count()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that vLLM takes for a Llama; it is never computed."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One service and one node, each a process, for all tests that break neither."""
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta()
        pool.start_node("n0", "64MiB")
        yield pool


@pytest.fixture
def own_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool of the test's own, to freeze, kill or fill."""
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta()
        pool.start_node("n0", "32MiB")
        yield pool


class Held:
    """A function whose callers wait, in threads of their own, until it is opened."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._open = threading.Event()
        self.callers = 0

    def open(self) -> None:
        self._open.set()

    def function(self) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.callers += 1
            self._open.wait()
            return self._original(*args, **options)

        return call


class Engines:
    """Starts engines of one test in one pool; engines of other tests use other namespaces."""

    def __init__(self, model: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = pool
        self.model_name = f"model-{os.getpid()}-{next(_names)}"
        self.engines: list[Engine] = []
        self.client = kvpool.connect(pool.uri, transports=["shm"])
        self._model = model
        self._monkeypatch = monkeypatch
        self._held: list[Held] = []

    def extra(self, **settings: Any) -> dict[str, Any]:
        """`kv_connector_extra_config`: patient, so that a slow machine changes nothing."""
        patient = {"lookup_timeout_s": 10, "load_timeout_s": 60, "save_timeout_s": 60, "lease_s": 60}
        return {"pool": self.pool.uri, "model": self.model_name, **patient, **settings}

    def build(self, shape: Shape | None = None, **settings: Any) -> Engine:
        """An engine whose halves have not spoken yet."""
        shape = shape or Shape()
        if shape.transfer is None:
            shape = replace(shape, extra=self.extra(**settings))
        engine = Engine(self._model, shape)
        self.engines.append(engine)
        return engine

    def start(self, shape: Shape | None = None, **settings: Any) -> Engine:
        """An engine that has reached the pool."""
        return self.build(shape, **settings).connect()

    def hold(self, owner: Any, name: str) -> Held:
        """Make callers of a function wait until the test, or its end, opens it."""
        held = Held(getattr(owner, name))
        self._held.append(held)
        self._monkeypatch.setattr(owner, name, held.function())
        return held

    def in_pool(self, engine: Engine, name: str) -> int:
        """Leading blocks of a request's chain that the pool holds."""
        namespace = engine.half.namespace
        assert namespace is not None
        return self.client.namespace(namespace).match(engine.chain(name)).blocks

    def corrupt(self, engine: Engine, name: str, index: int, rank: int = 0) -> None:
        """Flip a bit of a stored block, where it lies in the node's memory."""
        block = engine.ranks[rank].model.block_bytes(engine.streams[name], index).tobytes()
        for path in self.pool.directory.iterdir():
            if path.is_file() and path.stat().st_size >= len(block):
                with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                    at = memory.find(block)
                    if at >= 0:
                        memory[at + 7] ^= 1
                        return
        raise AssertionError("the block is in no file of the pool")

    def freeze_meta(self) -> None:
        """The service keeps its connections and answers nothing any more."""
        assert self.pool.meta is not None
        self.pool.signal(self.pool.meta, signal.SIGSTOP)

    def thaw_meta(self) -> None:
        assert self.pool.meta is not None
        self.pool.signal(self.pool.meta, signal.SIGCONT)

    def lose_blocks(self) -> None:
        """The node dies and comes back empty."""
        self.pool.kill(self.pool.nodes["n0"])
        for path in self.pool.directory.glob("kvpool-*"):
            path.unlink()
        self.pool.start_node("n0", "32MiB")

    def close(self) -> None:
        """Let everything end; nothing may be left."""
        for held in self._held:
            held.open()
        for engine in self.engines:
            if not engine.closed:
                engine.drain()
                engine.close()
                engine.half.book.check_integrity()
        self.client.close()


@pytest.fixture
def engines(tiny_model: Path, shared_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines in the shared pool; after the test nothing of them may be left."""
    yield from _engines(tiny_model, shared_pool, monkeypatch)


@pytest.fixture
def own_engines(tiny_model: Path, own_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines in a pool of the test's own."""
    yield from _engines(tiny_model, own_pool, monkeypatch)


def _engines(model: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    before = set(threading.enumerate())
    monkeypatch.setattr(connector_module, "_rank", lambda: (0, 0))  # put back at the end: engines replace it
    engines = Engines(model, pool, monkeypatch)
    try:
        yield engines
        engines.close()
        for thread in _ours(before):
            thread.join(STUCK_S)
        assert not _ours(before)
    finally:
        for held in engines._held:
            held.open()
        engines.thaw_meta()
        for engine in engines.engines:
            engine.close()
        engines.client.close()


def _ours(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that the connector or the client has started and not ended."""
    return [t for t in threading.enumerate() if t not in before and t.name.startswith(OUR_THREADS)]


@pytest.fixture
def tokens() -> Callable[[int], list[int]]:
    """Makes prompts that no other test, and no earlier call, has."""
    generator = random.Random(os.urandom(8))
    return lambda count: [generator.randrange(10, 30_000) for _ in range(count)]
