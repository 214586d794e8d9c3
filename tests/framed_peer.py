"""The far end of framed connections in the hands of a test: it says what it is told to, right or wrong."""

import socket
import struct
import threading
from contextlib import suppress

from kvpool.transport.wire.frame import HEADER_BYTES, Header, pack_header
from kvpool.transport.wire.messages import PROTOCOL_VERSION, Welcome, encode

SOON_S = 0.05
"""A deadline that is meant to pass."""
LONG_S = 20.0
"""One that is not."""
WELCOME = Welcome(PROTOCOL_VERSION, "peer", 7)


def frame(message, correlation=2, payload=b"", **header):
    """A frame as a peer sends it; the first call after the greeting has correlation 2."""
    body = encode(message)
    fields = Header(message.kind, correlation, 0, len(body), len(payload))._replace(**header)
    return pack_header(fields) + body + payload


class Peer:
    """The far end of connections, answering by hand on threads of its own.

    ``answer`` gets each connection's socket once it was greeted with ``greeting``; then the socket is closed.
    """

    def __init__(self, path, answer, greeting=frame(WELCOME, 1)):  # noqa: B008 - a constant
        self.uri = f"unix://{path}"
        self._answer, self._greeting = answer, greeting
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            sock, _ = self._listener.accept()
            if not self._threads:
                sock.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock):
        with sock, suppress(BrokenPipeError, ConnectionResetError):  # the caller may hang up at any time
            sock.settimeout(LONG_S)
            self.hello = receive_frame(sock)
            sock.sendall(self._greeting)
            self._answer(sock)

    def close(self):
        threads, self._threads = self._threads, []
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self._listener.getsockname())
        for thread in threads:
            thread.join()
        self._listener.close()


def receive(sock, size_bytes):
    """Exactly so many bytes; fewer when the connection was closed."""
    data = b""
    while len(data) < size_bytes and (chunk := sock.recv(size_bytes - len(data))):
        data += chunk
    return data


def receive_frame(sock):
    """Header and body of the next frame; empty when the connection was closed."""
    header = receive(sock, HEADER_BYTES)
    return header + receive(sock, struct.unpack_from("<I", header, 16)[0]) if header else b""


def wait_until_closed(sock):
    while sock.recv(1 << 16):
        pass
