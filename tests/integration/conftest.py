"""Real pools for integration tests: a metadata service and store nodes, each a process of its own."""

import itertools
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvpool
from kvpool.bench.process import RoleProcess
from kvpool.embedded import EmbeddedPool
from kvpool.ops.settings import MetaSettings, NodeSettings
from tests.integration.places import Place
from tests.waiting import eventually, is_frozen

if TYPE_CHECKING:
    from tests.integration.faulting import FaultPool, FaultPools

BLOCK_BYTES = 64 << 10


@dataclass
class Pool:
    """One metadata service and its nodes; every part can be stopped, killed, frozen and started again."""

    directory: Path
    stack: ExitStack
    grpc_port: int = 0
    meta: RoleProcess | None = None
    uri: str = ""
    nodes: dict[str, RoleProcess] = field(default_factory=dict)
    ready: dict[str, dict] = field(default_factory=dict)
    meta_ready: dict = field(default_factory=dict)
    module: str = "kvpool.cli.main"

    def start_meta(self, **options: object) -> None:
        options = {"grpc-port": self.grpc_port, "framed-port": 0, "http-port": 0, **options}
        log = self.directory / "meta.log"
        self.meta = self.stack.enter_context(RoleProcess("meta", options, log, environ=self.environ("meta")))
        self.meta_ready = self.meta.ready()
        self.uri = self.meta_ready["uri"]
        # A restart listens where clients and nodes know it.
        self.grpc_port = int(self.uri.rpartition(":")[2])

    def start_node(self, name: str, size: str = "32MiB", **options: object) -> None:
        options = {
            "meta": self.uri,
            "node-id": name,
            "size": size,
            "segment-dir": self.directory,
            "data-port": 0,
            "grpc-port": 0,
            "unix-socket": self.directory / f"{name}.sock",
            **options,
        }
        log = self.directory / f"{name}.log"
        node = self.stack.enter_context(
            RoleProcess("node", options, log, environ=self.environ(name), module=self.module)
        )
        self.nodes[name] = node
        self.ready[name] = node.ready()

    def environ(self, name: str) -> dict[str, str] | None:
        """What the process ``name`` gets as its environment; None: ours."""
        return None

    def signal(self, process: RoleProcess, number: signal.Signals) -> None:
        os.kill(process.pid, number)
        if number == signal.SIGSTOP:
            eventually(lambda: is_frozen(process.pid))

    def kill(self, process: RoleProcess) -> None:
        self.signal(process, signal.SIGKILL)
        self.stop(process)

    def stop(self, process: RoleProcess) -> None:
        process.stop()

    def connect(self, transport: str = "shm", **options: object) -> kvpool.Client:
        return self.stack.enter_context(kvpool.connect(self.uri, transports=[transport], **options))


@pytest.fixture
def start_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pool]]:
    """Starts pools of some nodes; all are gone after the test."""
    with ExitStack() as stack:

        def start(nodes: int = 1, size: str = "32MiB", **meta: object) -> Pool:
            pool = Pool(tmp_path_factory.mktemp("pool"), stack)
            pool.start_meta(**({"expected-nodes": nodes} | meta))
            for i in range(nodes):
                pool.start_node(f"n{i}", size)
            return pool

        yield start


@pytest.fixture(scope="session")
def long_lived_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        pool.start_meta(**{"expected-nodes": 1})
        pool.start_node("n0", "512MiB")
        yield pool


@pytest.fixture
def pool(long_lived_pool: Pool) -> Iterator[Pool]:
    """A pool of one node that tests share: they use namespaces of their own and break nothing."""
    with ExitStack() as stack:
        yield replace(long_lived_pool, stack=stack)


@pytest.fixture(scope="module")
def fault_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator["FaultPools"]:
    from tests.integration.faulting import FaultPools

    with closing(FaultPools(lambda: tmp_path_factory.mktemp("pool"))) as pools:
        yield pools


@pytest.fixture
def fault_pool(fault_pools: "FaultPools") -> "FaultPool":
    """A small pool with failpoints, which ends each test settled."""
    return fault_pools.take()


def embedded_in(folder: Path, node_id: str, size: str, *, meta: dict | None = None, **node: object) -> EmbeddedPool:
    """A pool of one node in this process, not yet started, with its files in ``folder``."""
    settings = NodeSettings(
        node_id=node_id,
        size=size,
        data_port=0,
        grpc_port=0,
        segment_dir=folder,
        unix_socket=folder / f"{node_id}.sock",
        keep_segment=False,
        **node,
    )
    return EmbeddedPool(MetaSettings(grpc_port=0, framed_port=0, **(meta or {})), settings)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedPool]:
    """A pool of one node in this process; without a scrub, since tests commit made-up checksums."""
    with embedded_in(tmp_path, "e0", "4MiB", meta={"reflection": True}, scrub_bytes_per_s=0) as pool:
        yield pool


@pytest.fixture
def place() -> Iterator[Place]:
    """Where one command runs; what it leaves running is killed."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as segments:
        place = Place(Path(segments))
        yield place
        for process in place.processes():
            process.kill()


@pytest.fixture(scope="session")
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


_names = itertools.count()


def open_blocks(client: kvpool.Client, block_bytes: int = BLOCK_BYTES, **fields: object) -> kvpool.Keyspace:
    """A namespace that no other test uses."""
    name = fields.pop("model", None) or f"model-{os.getpid()}-{next(_names)}"
    return client.namespace(kvpool.Namespace(model=name, block_tokens=16, block_bytes=block_bytes, **fields))


def random_chain(blocks: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(blocks)]


def random_blocks(rng: np.random.Generator, blocks: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    return rng.integers(0, 256, (blocks, block_bytes), np.uint8)


def blank(blocks: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    return np.zeros((blocks, block_bytes), np.uint8)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
