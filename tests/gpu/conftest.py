"""Tests on a real GPU, with CuPy and torch; skipped with the reason where one is missing."""

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

import kvpool
from kvpool.bench.measure import segment_folder
from kvpool.bench.process import RoleProcess
from kvpool.core.errors import UnavailableError
from kvpool.gpu import require_gpu


@pytest.fixture(scope="session", autouse=True)
def cupy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's and torch's own, while they are imported
        try:
            found = require_gpu()
        except UnavailableError as error:
            pytest.skip(str(error))
        pytest.importorskip("torch")
    return found


@pytest.fixture(scope="session")
def torch(cupy):
    return importlib.import_module("torch")


@pytest.fixture(scope="session")
def pages(torch):
    """The connector's pages, which need torch."""
    return importlib.import_module("kvpool_connector.vllm.pages")


class Pool:
    """A metadata service and a node as processes; ``segments`` is the folder of the node's files."""

    def __init__(self, stack: ExitStack, folder: Path, **options: object) -> None:
        self.segments = stack.enter_context(segment_folder())
        self._stack = stack
        self._folder = folder
        self._options = options
        meta = stack.enter_context(RoleProcess("meta", {"grpc-port": 0, "framed-port": 0}, folder / "meta.log"))
        self.uri = meta.ready()["uri"]
        self.node: RoleProcess
        self.start_node()

    def start_node(self) -> None:
        options = {
            "meta": self.uri,
            "node-id": "gpu",
            "segment-dir": self.segments,
            "unix-socket": self._folder / "node.sock",
            "data-port": 0,
            "grpc-port": 0,
            "scrub-bytes-per-s": 0,
            **self._options,
        }
        self.node = self._stack.enter_context(RoleProcess("node", options, self._folder / "node.log"))
        self.node.ready()

    @property
    def segment(self) -> Path:
        """The node's file of payload bytes."""
        return max(self.segments.iterdir(), key=lambda path: path.stat().st_size)

    def connect(self, *transports: str) -> kvpool.Client:
        return self._stack.enter_context(kvpool.connect(self.uri, transports=transports or ["shm"], timeout_s=30))

    def verify(self) -> dict:
        """What `kvpool verify` says of the node."""
        command = [sys.executable, "-m", "kvpool.cli.main", "verify", f"--pool={self.uri}", "--format=json"]
        ended = subprocess.run(command, capture_output=True, check=False, timeout=30)
        [record] = msgspec.json.decode(ended.stdout)["nodes"]
        return record


@pytest.fixture(scope="session")
def pool(cupy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(stack, tmp_path_factory.mktemp("gpu"), size="512MiB")


def node_gpu(cupy, which: str) -> str:
    """The device of a node whose clients use the first GPU."""
    if which == "own":
        return "cuda:0"
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU; a node on another one needs two")
    return "cuda:1"


@pytest.fixture(scope="session", params=["peer", "own"])
def vram_pool(request, cupy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool whose node holds its blocks in GPU memory: of another GPU than its clients', or of the same."""
    device = node_gpu(cupy, request.param)
    with ExitStack() as stack:
        yield Pool(stack, tmp_path_factory.mktemp("vram"), vram="512MiB", device=device)


@pytest.fixture
def start_vram_pool(cupy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pool]]:
    """Starts pools of a test's own."""
    with ExitStack() as stack:
        yield lambda **options: Pool(stack, tmp_path_factory.mktemp("vram"), **options)


@pytest.fixture(scope="session")
def clients(pool):
    return {transport: pool.connect(transport) for transport in ("shm", "tcp")}


def open_blocks(client: kvpool.Client, block_bytes: int) -> kvpool.Keyspace:
    name = f"gpu-{os.urandom(8).hex()}"
    return client.namespace(kvpool.Namespace(model=name, block_tokens=16, block_bytes=block_bytes))


def chain(blocks: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(blocks)]


def random_bytes(size_bytes: int) -> np.ndarray:
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)
