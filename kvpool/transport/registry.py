"""Transports by URI scheme; adding one is one file and one line here. Imports are lazy: `ucx` will need its wheel."""

from importlib import import_module

from kvpool.core.errors import SettingsError
from kvpool.transport.base import Transport

SCHEMES: dict[str, str] = {
    "inproc": "kvpool.transport.inproc:InprocTransport",
    "shm": "kvpool.transport.shm:ShmTransport",
    "unix": "kvpool.transport.tcp:TcpTransport",
    "tcp": "kvpool.transport.tcp:TcpTransport",
}
"""Scheme -> class, best first: the order in which a client tries what a node offers."""


def scheme_of(uri: str) -> str:
    """The scheme of ``uri``.

    Raises:
        SettingsError: No transport has this scheme.
    """
    scheme = uri.partition("://")[0]
    if scheme not in SCHEMES:
        raise SettingsError(f"transport {scheme!r} (of {uri!r}) is not known; use one of {', '.join(SCHEMES)}")
    return scheme


def open_transport(uri: str, principal: str, incarnation: int, streams: int, timeout_s: float) -> Transport:
    """Connect to the node at ``uri``, which must be the process with ``incarnation``.

    Raises:
        UnavailableError: Nobody answers there, or another process does.
    """
    module, _, name = SCHEMES[scheme_of(uri)].partition(":")
    transport: Transport = getattr(import_module(module), name)(uri, principal, incarnation, streams, timeout_s)
    return transport
