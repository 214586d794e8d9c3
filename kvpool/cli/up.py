"""`kvpool up`: runs a whole pool in one process on loopback."""

import contextlib
import os

from kvpool.cli import serve, with_settings
from kvpool.cli.output import Format, emit
from kvpool.core.units import format_size
from kvpool.ops.settings import ClientSettings, Settings
from kvpool.ops.version import __version__

LOOPBACK = "127.0.0.1"


@with_settings(
    "node.size",
    "node.node_id",
    "node.segment_dir",
    "node.hugepages",
    "node.disk",
    "node.disk_size",
    "node.unix_socket",
    "node.ucx",
    "node.data_port",
    "meta.grpc_port",
    "meta.framed_port",
    "meta.http_port",
    "tls.dir",
)
def up(settings: Settings, output: Format) -> None:
    """Run a whole pool in one process on loopback until SIGTERM or Ctrl-C."""
    from kvpool.embedded import EmbeddedPool  # noqa: PLC0415 - after the settings are known to be good

    # A pool for trying out gives its memory back; `kvpool node` is the one that keeps its blocks.
    # Its node's own gRPC, which has no flag here, takes any port: two pools can run side by side.
    fixed = {"keep_segment": False, "listen": LOOPBACK, "advertise_host": None, "grpc_port": 0, "http_port": 0}
    node = settings.node.model_copy(update=fixed)
    pool = EmbeddedPool(settings.meta.model_copy(update={"listen": LOOPBACK}), node, tls=settings.tls)

    def announce() -> None:
        ready = {
            "event": "ready",
            "role": "up",
            "pid": os.getpid(),
            "security": pool.meta.security,
            "uri": pool.uri,
            "http": pool.meta.http_uri,
            "capacity_bytes": settings.node.capacity_bytes,
            "transports": _transports(settings),
        }
        emit(ready, output, _banner(settings, pool.uri, pool.meta.http_uri))

    stack = contextlib.ExitStack()
    serve(lambda: stack.enter_context(pool), announce, stack.close)


def _transports(settings: Settings) -> list[str]:
    """What its node offers to other processes, best first."""
    return ["shm", *(["ucx"] if settings.node.ucx else []), "unix", "tcp"]


def _vllm_config(settings: Settings, uri: str) -> str:
    command = "kvpool vllm-config"
    if uri != ClientSettings().pool:
        command += f" --pool {uri}"
    return command if settings.tls.dir is None else f"{command} --tls-dir {settings.tls.dir}"


def _connect(settings: Settings, uri: str) -> str:
    tls = "" if settings.tls.dir is None else f', tls=kvpool.TlsSettings(dir="{settings.tls.dir}")'
    return f'import kvpool; pool = kvpool.connect("{uri}"{tls})'


def _banner(settings: Settings, uri: str, http_uri: str) -> str:
    node = settings.node
    rows = {
        "pool": uri,
        "capacity": f"{format_size(node.capacity_bytes)} in {node.device if node.vram else node.segment_dir}",
        "transports": ", ".join(_transports(settings)),
        "page": f"{http_uri}/",
        "metrics": f"{http_uri}/metrics",
        "in Python": _connect(settings, uri),
        "in vLLM": f'vllm serve MODEL --kv-transfer-config "$({_vllm_config(settings, uri)})"',
        "to stop": "Ctrl-C",
    }
    return "\n".join([f"kvpool {__version__}", *(f"  {name:<12}{value}" for name, value in rows.items())])
