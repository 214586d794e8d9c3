"""TLS for gRPC: credentials of ports, which follow when the files change, and of channels.

gRPC compares a server's DNS name, not its URI: certificates of servers carry one made of their identity, the same
wherever they run (`server_name`).
"""

import grpc

from kvpool.core.identities import SCHEME
from kvpool.ops.credentials import Credentials, Loaded

DOMAIN = "kvpool"


def server_name(identity: str) -> str:
    """The DNS name in the certificate of the server with ``identity``: ``meta.kvpool``, ``NODE_ID.node.kvpool``."""
    kind, _, name = identity.removeprefix(SCHEME).partition("/")
    return ".".join([*([name] if name else []), kind, DOMAIN])


def server_credentials(credentials: Credentials, *, tokens: bool) -> grpc.ServerCredentials:
    """For a port: callers show a certificate, or, on one for ``tokens``, none."""
    told = credentials.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC for each connection; None: as before."""
        nonlocal told
        loaded = credentials.current()
        if loaded is told:
            return None
        told = loaded
        return _configuration(loaded)

    # The stubs do not know None, which is what most connections get.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(told),
        renewed,  # type: ignore[arg-type]
        require_client_authentication=not tokens,
    )


def channel_credentials(loaded: Loaded) -> grpc.ChannelCredentials:
    """For a channel made now."""
    credentials = grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)
    if not loaded.token:
        return credentials
    return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(loaded.token))


def _configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    assert loaded.key is not None
    assert loaded.cert is not None
    pair = (loaded.key, loaded.cert)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=loaded.ca)
