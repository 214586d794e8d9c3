"""The ways to nodes: schemes in the order to try them, each got ready before its first use."""

import logging
import threading
from collections.abc import Callable, Sequence

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.identities import node_identity
from kvpool.ops.credentials import Credentials
from kvpool.transport.base import Target, Transport
from kvpool.transport.deadline import Deadline
from kvpool.transport.registry import (
    OVER_TLS,
    SCHEMES,
    open_transport,
    plain_scheme,
    prepare_transport,
    scheme_of,
)

CONNECT_TIMEOUT_S = 1.0

LOCAL_SCHEMES = frozenset({"inproc", "cuda", "shm", "unix"})
"""What reaches nodes of this host only: that it reaches no other says nothing."""

log = logging.getLogger("kvpool.transport")


class Ways:
    """Opens transports, and keeps what the process's transports of each scheme share. Thread-safe.

    A scheme that this process cannot have, say because UCX does not start, is left out for good, with a warning; each
    node that offers it is reached by the next one, which then says that it fell back.

    Args:
        schemes: In the order to try them.
        credentials: With them tcp means TCP with TLS, and nothing else: whoever offers plaintext may be anybody.

    Raises:
        SettingsError: A scheme that is not known.
    """

    def __init__(self, schemes: Sequence[str], credentials: Credentials | None = None) -> None:
        for scheme in schemes:
            scheme_of(f"{scheme}://")
        self.schemes = tuple(schemes)
        self._credentials = credentials
        self._let_go: dict[str, Callable[[], None]] = {}
        self._missing: dict[str, str] = {}
        self._lock = threading.Lock()

    def prepare(self, pool_uri: str) -> None:
        """Get all schemes ready for the pool at ``pool_uri``; what is not ready by then is at its first use.

        Raises:
            SettingsError: What one of them needs is not installed.
            UnavailableError: None can be had.
        """
        try:
            ready = [scheme for scheme in self.schemes if self._is_ready(scheme, pool_uri)]
        except BaseException:
            self.close()
            raise
        if not ready:
            raise UnavailableError("; ".join(self._missing.values()))

    def open(
        self,
        node_id: str,
        endpoints: Sequence[str],
        principal: str,
        incarnation: int,
        streams: int,
        deadline: Deadline,
    ) -> Transport:
        """The transport to a node by the first scheme that reaches it at one of its ``endpoints``.

        Raises:
            UnavailableError: None does.
        """
        offered = [uri for uri in endpoints if plain_scheme(uri) in SCHEMES]
        peer = None if self._credentials is None else self._credentials.toward(node_identity(node_id))
        tried: dict[str, str] = {}
        for scheme in self.schemes:
            for uri in offered:
                if not uri.startswith(f"{scheme if peer is None else OVER_TLS.get(scheme, scheme)}://"):
                    continue
                try:
                    if not self._is_ready(scheme, uri):
                        raise UnavailableError(self._missing[scheme])
                    timeout_s = min(CONNECT_TIMEOUT_S, deadline.left_s())
                    transport = open_transport(Target(uri, principal, incarnation, streams, timeout_s, peer))
                except KvpoolError as error:
                    tried[uri] = str(error)
                    continue
                _tell(transport, node_id, uri, tried)
                return transport
        why = "; ".join(f"{uri}: {error}" for uri, error in tried.items()) or f"it offers {', '.join(offered)}"
        raise UnavailableError(f"node {node_id} cannot be reached over {', '.join(self.schemes)}: {why}")

    def close(self) -> None:
        """Let go of what was got ready."""
        with self._lock:
            while self._let_go:
                self._let_go.popitem()[1]()

    def _is_ready(self, scheme: str, uri: str) -> bool:
        """Whether ``scheme`` can be had; the first time it is got ready, for peers like that at ``uri``."""
        with self._lock:
            if scheme not in self._let_go and scheme not in self._missing:
                try:
                    self._let_go[scheme] = prepare_transport(scheme, uri)
                except UnavailableError as error:
                    self._missing[scheme] = str(error)
                    log.warning("transport %s cannot be used by this process: %s", scheme, error)
            return scheme in self._let_go


def _tell(transport: Transport, node_id: str, uri: str, tried: dict[str, str]) -> None:
    missed = {uri: error for uri, error in tried.items() if uri.partition("://")[0] not in LOCAL_SCHEMES}
    if missed:
        transport.fell_back = True
        log.warning("node %s is reached over %s (%s), not %s", node_id, transport.name, uri, missed)
    else:
        log.info("node %s is reached over %s (%s)", node_id, transport.name, uri)
