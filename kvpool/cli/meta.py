"""`kvpool meta`: runs the metadata service until it is told to stop."""

import os

from kvpool.cli import serve, with_settings
from kvpool.cli.connecting import SERVER_TLS_KEYS
from kvpool.cli.output import Format, emit
from kvpool.ops.authentication import Security
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import Settings
from kvpool.ops.version import __version__


@with_settings(
    "meta.listen",
    "meta.advertise_host",
    "meta.grpc_port",
    "meta.framed_port",
    "meta.http_listen",
    "meta.http_port",
    "meta.unix_socket",
    "meta.token_port",
    "meta.events_port",
    "meta.events_replay_batches",
    "meta.events_hwm",
    "meta.insecure",
    "meta.audit",
    "meta.lease_max_s",
    "meta.lease_cap",
    "meta.reservation_ttl_s",
    "meta.heartbeat_s",
    "meta.node_ttl_s",
    "meta.expected_nodes",
    "meta.recovery_wait_s",
    "meta.recovery_deadline_s",
    "meta.tombstones",
    "meta.connections_max",
    "meta.requests_max",
    "meta.nodes_max",
    "meta.reflection",
    "meta.state",
    "meta.state_password_file",
    "meta.state_timeout_s",
    "meta.policy",
    "meta.replicas_max",
    "meta.replica_read_rate",
    "meta.replica_budget",
    "meta.tenants",
    "meta.tenant_default",
    *SERVER_TLS_KEYS,
)
def meta(settings: Settings, output: Format) -> None:
    """Run the metadata service until SIGTERM or Ctrl-C."""
    from kvpool.meta import MetaServer  # noqa: PLC0415 - after the settings are known to be good

    server = MetaServer(settings.meta, settings.tls)
    if server.security == Security.INSECURE:
        get_logger(__name__).warning("plaintext_without_authentication", listen=settings.meta.listen)

    def announce() -> None:
        scheme = "tls" if server.security == Security.TLS else "tcp"
        places = {"uri": f"grpc://{server.grpc_address}", "framed": f"{scheme}://{server.framed_address}"}
        if server.token_address:
            places["for_tokens"] = f"grpc://{server.token_address}"
        if settings.meta.unix_socket is not None:
            places["unix"] = str(settings.meta.unix_socket)
        if server.events is not None:
            places |= zip(("events", "events_replay"), server.event_endpoints, strict=True)
        places["http"] = server.http_uri
        ready = {"event": "ready", "role": "meta", "pid": os.getpid(), "security": server.security, **places}
        emit(ready, output, f"kvpool meta {__version__} ready ({server.security}): {', '.join(places.values())}")

    serve(server.start, announce, server.stop)
