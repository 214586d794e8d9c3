"""Mooncake's store for vLLM's own MooncakeStoreConnector: a master and a process that holds the blocks, over TCP."""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.bench.process import log_tail
from kvpool.bench.waiting import wait_until
from kvpool.core.errors import UnavailableError

INSTALL_MOONCAKE = (
    "pip install mooncake-transfer-engine-non-cuda && apt-get install -y libibverbs1 librdmacm1 libnuma1 libcurl4"
)

KV_TRANSFER = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}

READY_S = 30.0

_LOOPBACK = "127.0.0.1"
_REQUEST_S = 5.0
_LOCAL_BUFFER_BYTES = 512 << 20
_LOG_TAIL_BYTES = 1_500


def missing_mooncake() -> str | None:
    """Why there is no Mooncake here, with what to install; None when there is one."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"mooncake cannot be imported ({error}); {INSTALL_MOONCAKE}"
    return None


@dataclass(frozen=True, slots=True)
class MooncakeStore:
    """A running store.

    Attributes:
        environ: What an engine that uses it needs in its environment.
        metrics: Where the master says what it holds.
    """

    environ: dict[str, str]
    metrics: str

    def keys(self) -> int:
        """Objects held; the connector stores one for each block. Raises UnavailableError."""
        return int(self._metric("master_key_count"))

    def capacity_bytes(self) -> int:
        """Memory of the processes that hold blocks. Raises UnavailableError."""
        return int(self._metric("master_total_capacity_bytes"))

    def _metric(self, name: str) -> float:
        try:
            with urllib.request.urlopen(self.metrics, timeout=_REQUEST_S) as answer:  # noqa: S310 - loopback http
                return metric_of(answer.read().decode(), name)
        except (urllib.error.URLError, OSError) as error:
            raise UnavailableError(f"mooncake's master does not answer: {error}") from error


def metric_of(text: str, name: str) -> float:
    """The value of a metric without labels in Prometheus text; raises UnavailableError when it is not there."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return float(value)
    raise UnavailableError(f"mooncake's master has no metric {name}")


@contextlib.contextmanager
def mooncake_store(size_bytes: int, folder: Path) -> Iterator[MooncakeStore]:
    """A master and one process with ``size_bytes`` of memory, both killed in the end.

    Args:
        size_bytes: Memory for blocks; twice what is stored, since the master evicts before it is full.
        folder: For logs, the config file and the connector's socket.

    Raises:
        UnavailableError: One of them did not start; quotes its log.
    """
    rpc, metrics, holder = free_ports(3)
    master = f"{_LOOPBACK}:{rpc}"
    store = MooncakeStore(_environ(folder, master), f"http://{_LOOPBACK}:{metrics}/metrics")
    with contextlib.ExitStack() as stack:
        flags = {"rpc_port": rpc, "rpc_address": _LOOPBACK, "metrics_port": metrics, "metrics_host": _LOOPBACK}
        stack.enter_context(_process("mooncake_master", flags, folder))
        _await(lambda: store.capacity_bytes() == 0, "mooncake_master", folder)
        flags = {
            "host": _LOOPBACK,
            "port": holder,
            "global_segment_size": f"{size_bytes} B",
            "master_server_address": master,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
        }
        stack.enter_context(_process("mooncake_client", flags, folder))
        _await(lambda: store.capacity_bytes() > 0, "mooncake_client", folder)
        yield store


def free_ports(count: int) -> Sequence[int]:
    """Ports nobody listens on right now: these programs cannot be told to choose one and say which."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def store_config(master: str) -> dict[str, Any]:
    """What MOONCAKE_CONFIG_PATH says: the engine holds nothing itself, all blocks lie in the other process."""
    return {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": _LOCAL_BUFFER_BYTES,
    }


def _environ(folder: Path, master: str) -> dict[str, str]:
    config = folder / "mooncake.json"
    config.write_text(json.dumps(store_config(master)))
    return {"MOONCAKE_CONFIG_PATH": str(config), "VLLM_HOST_IP": _LOOPBACK, "VLLM_RPC_BASE_PATH": str(folder)}


@contextlib.contextmanager
def _process(program: str, flags: dict[str, object], folder: Path) -> Iterator[None]:
    package = importlib.import_module("mooncake")
    assert package.__file__ is not None
    command = [str(Path(package.__file__).parent / program), *(f"-{name}={value}" for name, value in flags.items())]
    with (folder / f"{program}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - a program of an installed package, arguments as a list
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        # Killed: asked to end, they first wait for each other.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(condition: Callable[[], bool], program: str, folder: Path) -> None:
    def reached() -> bool:
        try:
            return condition()
        except UnavailableError:
            return False

    if not wait_until(reached, READY_S):
        tail = log_tail(folder / f"{program}.log", _LOG_TAIL_BYTES)
        raise UnavailableError(f"{program} was not ready within {READY_S:g} s; its log ends: {tail}")
