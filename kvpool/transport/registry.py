"""Transports by URI scheme; adding one is one file and one line here. Imports are lazy."""

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from kvpool.core.errors import KvpoolError, SettingsError, UnavailableError
from kvpool.transport.base import Transport
from kvpool.transport.deadline import Deadline

CONNECT_TIMEOUT_S = 1.0

log = logging.getLogger("kvpool.transport")

SCHEMES: dict[str, str] = {
    "inproc": "kvpool.transport.inproc:InprocTransport",
    "shm": "kvpool.transport.shm:ShmTransport",
    "ucx": "kvpool.transport.ucx.transport:UcxTransport",
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
    transport: Transport = _class_of(scheme_of(uri))(uri, principal, incarnation, streams, timeout_s)
    return transport


def prepare_transport(scheme: str, pool_uri: str) -> Callable[[], None]:
    """See `Transport.prepare`."""
    let_go: Callable[[], None] = _class_of(scheme).prepare(pool_uri)
    return let_go


def open_best(
    node_id: str,
    endpoints: Sequence[str],
    schemes: Sequence[str],
    principal: str,
    incarnation: int,
    streams: int,
    deadline: Deadline,
) -> Transport:
    """The transport to a node by the first of ``schemes`` that reaches it at one of its ``endpoints``.

    Raises:
        UnavailableError: None does.
    """
    offered = [uri for uri in endpoints if uri.partition("://")[0] in SCHEMES]
    tried: list[str] = []
    for scheme in schemes:
        for uri in offered:
            if not uri.startswith(f"{scheme}://"):
                continue
            timeout_s = min(CONNECT_TIMEOUT_S, deadline.left_s())
            try:
                transport = open_transport(uri, principal, incarnation, streams, timeout_s)
            except KvpoolError as error:
                tried.append(f"{uri}: {error}")
                continue
            log.info("node %s is reached over %s (%s)", node_id, transport.name, uri)
            return transport
    raise UnavailableError(
        f"node {node_id} cannot be reached over {', '.join(schemes)}: "
        f"{'; '.join(tried) or 'it offers ' + ', '.join(offered)}"
    )


def _class_of(scheme: str) -> type[Any]:
    module, _, name = SCHEMES[scheme].partition(":")
    cls: type[Any] = getattr(import_module(module), name)
    return cls
