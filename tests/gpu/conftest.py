"""Tests on a real GPU, with CuPy and torch; skipped with the reason where one is missing."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

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
    """A metadata service and a node as processes; ``segment`` is the node's file of payload bytes."""

    def __init__(self, stack: ExitStack, folder: Path, segments: Path) -> None:
        meta = stack.enter_context(RoleProcess("meta", {"grpc-port": 0, "framed-port": 0}, folder / "meta.log"))
        self.uri = meta.ready()["uri"]
        options = {
            "meta": self.uri,
            "node-id": "gpu",
            "size": "512MiB",
            "segment-dir": segments,
            "unix-socket": folder / "node.sock",
            "data-port": 0,
            "grpc-port": 0,
            "scrub-bytes-per-s": 0,
        }
        node = stack.enter_context(RoleProcess("node", options, folder / "node.log"))
        node.ready()
        self.segment = max(segments.iterdir(), key=lambda path: path.stat().st_size)
        self._stack = stack

    def connect(self, transport: str = "shm") -> kvpool.Client:
        return self._stack.enter_context(kvpool.connect(self.uri, transports=[transport], timeout_s=30))


@pytest.fixture(scope="session")
def pool(cupy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with ExitStack() as stack:
        segments = stack.enter_context(segment_folder())
        yield Pool(stack, tmp_path_factory.mktemp("gpu"), segments)


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
