"""gRPC channels: with this process's credentials, as they are now, and with errors that say why there is no way."""

import socket
import ssl
import threading

import grpc

from kvpool.core.errors import AuthenticationError, DeadlineError, KvpoolError, StateAwayError, UnavailableError
from kvpool.ops.addresses import split_address
from kvpool.ops.credentials import TlsPeer
from kvpool.ops.grpc_server import CHANNEL_OPTIONS, raised_by
from kvpool.ops.grpc_tls import DOMAIN, channel_credentials, server_name
from kvpool.ops.handshakes import handshake_problem

LOOK_S = 1.0
"""How long it may take to find out why a server hung up."""

HUNG_UP = ("Socket closed", "Connection reset", "handshake failed")
"""What gRPC says of a connection that it could not set up, though somebody was there."""


class Channels:
    """The channel to one server, made anew when this process's credentials have changed. Thread-safe.

    Calls under way end on the channel that they began on; a channel is closed when the second one after it is made.
    Of several servers the next one is taken when one cannot be reached.

    Args:
        address: ``host:port``; several with commas between, each as good as the others.
        peer: Who must answer there; None: plaintext, to anybody.
    """

    def __init__(self, address: str, peer: TlsPeer | None) -> None:
        self._addresses = address.split(",")
        self._at = 0
        self._used = threading.local()
        self._peer = peer
        self._lock = threading.Lock()
        self._loaded = peer.credentials.current() if peer else None
        self._channels = [self.open()]

    def current(self) -> grpc.Channel:
        """The channel for a call made now."""
        if self._peer is not None and self._peer.credentials.current() is not self._loaded:
            self._renew(self._peer)
        self._used.at = self._at
        return self._channels[-1]

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._addresses)

    @property
    def _address(self) -> str:
        return self._addresses[self._at]

    def open(self) -> grpc.Channel:
        """A channel of the caller's own."""
        self._used.at = self._at
        if self._peer is None:
            return grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        credentials = channel_credentials(self._peer.credentials.current())
        name = ("grpc.ssl_target_name_override", server_name(self._peer.server))
        return grpc.secure_channel(self._address, credentials, options=(*CHANNEL_OPTIONS, name))

    def failure(self, error: grpc.RpcError, timeout_s: float) -> KvpoolError:
        """The error that a failed call stands for; takes up to ``timeout_s``, at most `LOOK_S`, to find out.

        Of a server that hangs up during the handshake gRPC says no more than that. Nothing else is worth a look: of a
        host that does not answer, or a name that nobody knows, it would only be slower to hear.
        """
        raised, address = raised_by(error), self._address
        if type(raised) is UnavailableError or isinstance(raised, DeadlineError | StateAwayError):
            self._move()
        if type(raised) is not UnavailableError or not _hung_up(str(raised)) or timeout_s <= 0:
            return raised
        reason = why_refused(address, self._peer, min(timeout_s, LOOK_S))
        return AuthenticationError(reason) if reason else raised

    def close(self) -> None:
        """Close them; calls under way fail."""
        with self._lock:
            for channel in self._channels:
                channel.close()

    def _move(self) -> None:
        """Take the next server, unless another thread has left the one that this one's call failed on."""
        if len(self._addresses) == 1:
            return
        with self._lock:
            if getattr(self._used, "at", self._at) == self._at:
                self._at = (self._at + 1) % len(self._addresses)
                self._replace()

    def _renew(self, peer: TlsPeer) -> None:
        with self._lock:
            loaded = peer.credentials.current()
            if loaded is self._loaded:
                return
            self._loaded = loaded
            self._replace()

    def _replace(self) -> None:
        self._channels.append(self.open())
        if len(self._channels) > 2:
            self._channels.pop(0).close()


def _hung_up(details: str) -> bool:
    return "failed to connect" in details and any(words in details for words in HUNG_UP)


def why_refused(address: str, peer: TlsPeer | None, timeout_s: float) -> str:
    """What is wrong between this process's credentials and the gRPC server at ``address``; empty: not they."""
    try:
        with socket.create_connection(split_address(address), timeout_s) as sock:
            return _hears_tls(sock) if peer is None else _hangs_up(sock, peer)
    except (OSError, KvpoolError):
        return ""


def _hears_tls(sock: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which believes nobody: a certificate is all that is waited for
    try:
        context.wrap_socket(sock, server_hostname=DOMAIN)
    except ssl.SSLCertVerificationError:
        return "it speaks TLS: name certificates, e.g. with tls.dir (--tls-dir)"
    return ""


def _hangs_up(sock: socket.socket, peer: TlsPeer) -> str:
    context = peer.credentials.client_context()
    try:
        with context.wrap_socket(sock, server_hostname=server_name(peer.server)) as secured:
            # With TLS 1.3 a caller is refused after its own side of the handshake has ended.
            if secured.recv(1):
                return ""
    except (ssl.SSLEOFError, ConnectionResetError):
        pass
    except ssl.SSLError as error:
        return handshake_problem(error)
    leaf = peer.credentials.current().leaf
    if leaf is None:
        return "it wants a certificate, and this process has a token: there is another port for those"
    return f"it does not take the certificate of {leaf.identity}, valid until {leaf.until}"
