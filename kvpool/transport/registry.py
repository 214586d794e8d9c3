"""Transports by URI scheme; adding one is one file and one line here. Imports are lazy."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvpool.core.errors import SettingsError
from kvpool.transport.base import Target, Transport

SCHEMES: dict[str, str] = {
    "inproc": "kvpool.transport.inproc:InprocTransport",
    "cuda": "kvpool.transport.cuda:CudaTransport",
    "shm": "kvpool.transport.shm:ShmTransport",
    "ucx": "kvpool.transport.ucx.transport:UcxTransport",
    "unix": "kvpool.transport.tcp:TcpTransport",
    "tcp": "kvpool.transport.tcp:TcpTransport",
}
"""Scheme -> class, best first: the order in which a client tries what a node offers."""


OVER_TLS = {"tcp": "tls"}
"""Scheme -> that of a node's endpoints which whoever has certificates takes instead."""


def scheme_of(uri: str) -> str:
    """The scheme of ``uri``.

    Raises:
        SettingsError: No transport has this scheme.
    """
    scheme = plain_scheme(uri)
    if scheme not in SCHEMES:
        raise SettingsError(f"transport {scheme!r} (of {uri!r}) is not known; use one of {', '.join(SCHEMES)}")
    return scheme


def plain_scheme(uri: str) -> str:
    """The scheme of ``uri``, without TLS; of one that no transport has too."""
    scheme = uri.partition("://")[0]
    return next((plain for plain, over_tls in OVER_TLS.items() if over_tls == scheme), scheme)


def open_transport(target: Target) -> Transport:
    """Connect to a node.

    Raises:
        UnavailableError: Nobody answers there, or another process does.
    """
    transport: Transport = _class_of(scheme_of(target.uri))(target)
    return transport


def prepare_transport(scheme: str, pool_uri: str) -> Callable[[], None]:
    """See `Transport.prepare`."""
    let_go: Callable[[], None] = _class_of(scheme).prepare(pool_uri)
    return let_go


def _class_of(scheme: str) -> type[Any]:
    module, _, name = SCHEMES[scheme].partition(":")
    cls: type[Any] = getattr(import_module(module), name)
    return cls
