"""`kvpool node`: runs a store node until it is told to stop."""

import os
import signal

from kvpool.cli import serve, with_settings
from kvpool.cli.connecting import SERVER_TLS_KEYS
from kvpool.cli.output import Format, emit
from kvpool.core.units import format_size
from kvpool.ops.authentication import Security
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import Settings
from kvpool.ops.version import __version__


@with_settings(
    "node.meta",
    "node.node_id",
    "node.size",
    "node.vram",
    "node.device",
    "node.segment_dir",
    "node.hugepages",
    "node.disk",
    "node.disk_size",
    "node.listen",
    "node.advertise_host",
    "node.data_port",
    "node.grpc_port",
    "node.http_listen",
    "node.http_port",
    "node.unix_socket",
    "node.ucx",
    "node.ucx_plaintext",
    "node.mapping",
    "node.audit",
    "node.insecure",
    "node.connections_max",
    "node.keep_segment",
    "node.scrub_bytes_per_s",
    "node.scrub_interval_s",
    "node.join_timeout_s",
    "node.quarantine_s",
    "node.drain_timeout_s",
    *SERVER_TLS_KEYS,
)
def node(settings: Settings, output: Format) -> None:
    """Run a store node until SIGTERM (it drains first), Ctrl-C, or until `kvpool drain` has emptied it."""
    from kvpool.node import NodeServer  # noqa: PLC0415 - after the settings are known to be good

    server = NodeServer(settings.node, on_leave=lambda: os.kill(os.getpid(), signal.SIGTERM), tls=settings.tls)
    if server.security == Security.INSECURE:
        get_logger(__name__).warning("plaintext_without_authentication", listen=settings.node.listen)

    def announce() -> None:
        ready = {
            "event": "ready",
            "role": "node",
            "node_id": settings.node.node_id,
            "pid": os.getpid(),
            "security": server.security,
            "data": f"{'tls' if server.security == Security.TLS else 'tcp'}://{server.data_address}",
            "unix": str(server.unix_path),
            "grpc": f"grpc://{server.grpc_address}",
            "http": server.http_uri,
            "capacity_bytes": settings.node.capacity_bytes,
        }
        name, size = settings.node.node_id, format_size(settings.node.capacity_bytes)
        emit(
            ready,
            output,
            f"kvpool node {__version__} {name} ready ({server.security}): {size}, {ready['data']}, {ready['unix']}",
        )

    serve(server.start, announce, server.stop, server.drain)
