"""What comes before the first frame on a connection that a server has accepted: who is there?

Over TCP with TLS the handshake says, on the connection's own thread and within a limit: a peer that never ends it holds
up nobody. A Unix socket stays plaintext, since nothing leaves the host: the kernel says whose process is at its other
end, and only the server's own user and root are served.
"""

import os
import socket
import ssl
import struct
from contextlib import suppress

from kvpool.core.errors import AuthenticationError
from kvpool.ops.authentication import Authenticator
from kvpool.ops.handshakes import handshake_problem
from kvpool.transport.wire.framed import FramedSocket
from kvpool.transport.wire.tls import TlsSocket, accept_tls

HANDSHAKE_S = 5.0
"""How long a TLS handshake may take."""

LINGER_S = 1.0
LINGER_BYTES_MAX = 1 << 16
"""How long, and for how much, a connection is read that was refused: closed with something unread it would be reset,
and the peer would not see why."""

_CREDENTIALS = struct.Struct("3i")
_ROOT = 0


def accept(sock: socket.socket, authenticator: Authenticator | None) -> FramedSocket:
    """The connection, to be met before it is served. Raises OSError when the peer has gone."""
    if authenticator is None or sock.family == socket.AF_UNIX:
        return FramedSocket(sock)
    return accept_tls(sock, authenticator.credentials.server_context(tokens=authenticator.tokens is not None))


def meet(framed: FramedSocket) -> None:
    """Find out who is there.

    Raises:
        AuthenticationError: Nobody who may come.
        OSError: The peer went away.
    """
    if framed.sock.family == socket.AF_UNIX:
        _check_user(framed.sock)
        return
    if not isinstance(framed, TlsSocket):
        return
    try:
        framed.handshake(HANDSHAKE_S)
    except ssl.SSLEOFError:
        raise
    except ssl.SSLError as error:
        raise AuthenticationError(handshake_problem(error)) from error
    except TimeoutError as error:
        raise AuthenticationError(f"it did not end the TLS handshake in {HANDSHAKE_S:g} s") from error


def turn_away(framed: FramedSocket) -> None:
    """End a connection so that the peer can read the last thing that was said to it. Does not close it."""
    sock = framed.sock
    with suppress(OSError):  # it has gone
        socket.socket.shutdown(sock, socket.SHUT_WR)
        sock.settimeout(LINGER_S)
        for _ in range(16):
            if not socket.socket.recv(sock, LINGER_BYTES_MAX // 16):
                return


def shown_peer(framed: FramedSocket) -> str:
    """Who is at the other end, for logs."""
    try:
        address = framed.sock.getpeername()
    except OSError:
        return "gone"
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unix"


def _check_user(sock: socket.socket) -> None:
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user not in (os.getuid(), _ROOT):
        raise AuthenticationError(f"a process of user {user}; this socket is for user {os.getuid()} and root")
