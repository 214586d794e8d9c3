"""How commands reach a pool: as its operator, where there is a certificate that says so, or as any client."""

from typing import TYPE_CHECKING

from kvpool.ops.credentials import as_first_of
from kvpool.ops.settings import Settings, TlsSettings

if TYPE_CHECKING:
    from kvpool.client import Client

CLIENT_TLS_KEYS = ("tls.dir", "tls.ca", "tls.cert", "tls.key", "tls.token_file")
SERVER_TLS_KEYS = ("tls.dir", "tls.ca", "tls.cert", "tls.key", "tls.tokens")

_OPERATORS = ("admin", "observer", "client")
"""Certificates of a folder, the one first that may do the most."""


def connect_operator(settings: Settings) -> "Client":
    """A client as the settings have it, with the rights of an operator; raises KvpoolError."""
    return _connect(settings, as_first_of(settings.tls, _OPERATORS))


def connect_client(settings: Settings) -> "Client":
    """A client as the settings have it, with the rights of one; raises KvpoolError."""
    return _connect(settings, settings.tls)


def _connect(settings: Settings, tls: TlsSettings) -> "Client":
    from kvpool import connect  # noqa: PLC0415 - help is quick without it

    client = settings.client
    return connect(
        client.pool, transports=client.transports, timeout_s=client.timeout_s, streams=client.streams, tls=tls
    )
