"""Framed sockets over TLS: the same frames, read and written record by record.

Python's TLS sockets know neither gathered writes nor kernel timers: each buffer is written and read on its own, and the
time limit is Python's. What comes beyond that is the price of AES-GCM (`kvpool bench transfer --tls`).
"""

import socket
import ssl

from kvpool.core.errors import AuthenticationError
from kvpool.ops.credentials import TlsPeer
from kvpool.ops.handshakes import handshake_problem, peer_identities
from kvpool.transport.wire.framed import FramedSocket

RECORD_BYTES_MAX = 1 << 14
"""TLS cuts what is sent into records of so many bytes."""

_TIMEOUT_S_MIN = 0.001
"""A time-out of zero would mean not to wait at all."""


class TlsSocket(FramedSocket):
    """A `FramedSocket` over TLS; nothing travels before `handshake`."""

    sock: ssl.SSLSocket

    def handshake(self, timeout_s: float) -> None:
        """Learn who the peer is: `identities`; raises OSError, of which `ssl.SSLError` is one, when that fails."""
        self.arm(timeout_s)
        self.sock.do_handshake()
        self.identities = peer_identities(self.sock)

    def arm(self, timeout_s: float) -> None:
        """See `FramedSocket.arm`; bounds each read and write, not each system call."""
        self.sock.settimeout(max(timeout_s, _TIMEOUT_S_MIN))

    def readable(self, timeout_s: float) -> bool:
        """See `FramedSocket.readable`."""
        return bool(self.sock.pending()) or super().readable(timeout_s)

    def _hang_up(self) -> None:
        # Not SSLSocket's own: from then on it would send and take what it is given in the clear.
        socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def _receive_some(self, view: memoryview) -> int:
        return self.sock.recv_into(view[:RECORD_BYTES_MAX])

    def _scatter_some(self, group: list[memoryview]) -> int:
        return self._receive_some(group[0])

    def _send_some(self, group: list[memoryview]) -> int:
        return self.sock.send(group[0][:RECORD_BYTES_MAX])

    def _send_all(self, data: bytes) -> None:
        self._send_buffers([memoryview(data)])


def accept_tls(sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """The serving side of a connection just accepted; its handshake is still to come. Raises OSError."""
    return TlsSocket(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))


def dial_tls(uri: str, sock: socket.socket, peer: TlsPeer, timeout_s: float) -> TlsSocket:
    """The calling side of a connection just made: the server must prove to be ``peer.server``. Takes the socket over.

    Raises:
        AuthenticationError: The server does not speak TLS, or is another one.
        OSError: It went, or did not answer in time.
    """
    framed = TlsSocket(peer.credentials.client_context().wrap_socket(sock, do_handshake_on_connect=False))
    try:
        framed.handshake(timeout_s)
        if peer.server not in framed.identities:
            shown = ", ".join(framed.identities) or "nobody of kvpool's"
            raise AuthenticationError(f"{uri} should be {peer.server}; its certificate says {shown}")
    except ssl.SSLError as error:
        framed.close()
        raise AuthenticationError(f"{uri}: {handshake_problem(error)}") from error
    except BaseException:
        framed.close()
        raise
    return framed
