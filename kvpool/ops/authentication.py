"""Who calls a server: decided here for every connection and every gRPC call, by certificate or by token."""

from collections.abc import Sequence
from enum import StrEnum

from kvpool.core.errors import AuthenticationError, SettingsError
from kvpool.core.identities import SCHEME, principal_of_identity
from kvpool.core.principals import Principal
from kvpool.ops.credentials import Credentials, open_credentials
from kvpool.ops.settings import TLS_OR_INSECURE, ServerSettings, TlsSettings, is_loopback
from kvpool.ops.tokens import Tokens

_BEARER = "Bearer "


class Security(StrEnum):
    """How a server is guarded, as every status shows it."""

    TLS = "tls"
    LOOPBACK = "loopback"
    """Plaintext, for this host alone."""
    INSECURE = "insecure"
    """Plaintext, for whoever reaches it."""


class Authenticator:
    """Lets nobody in who has not proven who it is. Thread-safe.

    Args:
        credentials: The server's own.
        tokens: The tokens it takes; None: certificates alone.
    """

    def __init__(self, credentials: Credentials, tokens: Tokens | None = None) -> None:
        self.credentials = credentials
        self.tokens = tokens

    def caller(self, identities: Sequence[str], token: str) -> Principal:
        """Who calls: the holder of a certificate with ``identities``, else of ``token``.

        Raises:
            AuthenticationError: Neither, or not one of ours.
        """
        ours = [identity for identity in identities if identity.startswith(SCHEME)]
        if len(ours) > 1:
            raise AuthenticationError(f"the certificate has {len(ours)} names kvpool://...; it needs one")
        if ours:
            return principal_of_identity(ours[0])
        if token and self.tokens is not None:
            return self.tokens.holder(token)
        nor = "" if self.tokens is None else ", nor a token"
        raise AuthenticationError(f"who calls? There is no certificate with a name kvpool://...{nor}")


def open_authenticator(tls: TlsSettings, settings: ServerSettings, name: str, identity: str) -> Authenticator | None:
    """What guards a server; None: it serves plaintext, to this host alone or because it was told to.

    Args:
        tls: Where its credentials are.
        settings: Where it listens.
        name: Of its certificate in ``tls.dir``.
        identity: Who it must be.

    Raises:
        SettingsError: Credentials that cannot be used, or none for a server that others can reach.
    """
    credentials = open_credentials(tls, [name], identity)
    if credentials is not None:
        return Authenticator(credentials, None if tls.tokens is None else Tokens(tls.tokens))
    if not (is_loopback(settings.listen) or settings.insecure):
        raise SettingsError(f"listen = {settings.listen!r}: listening beyond loopback needs {TLS_OR_INSECURE}")
    return None


def bearer_token(authorization: Sequence[str]) -> str:
    """The token in the values of an ``Authorization`` header; empty when there is not exactly one."""
    one = authorization[0] if len(authorization) == 1 else ""
    return one.removeprefix(_BEARER) if one.startswith(_BEARER) else ""


def pages_guard(authenticator: Authenticator | None, settings: ServerSettings) -> Authenticator | None:
    """What guards a server's HTTP pages: nothing for this host alone, or where it was told so."""
    return None if is_loopback(settings.http_listen) or settings.insecure else authenticator


def security_of(authenticator: Authenticator | None, settings: ServerSettings) -> Security:
    """How a server with these is guarded."""
    if authenticator is not None:
        return Security.TLS
    return Security.LOOPBACK if is_loopback(settings.listen) else Security.INSECURE
