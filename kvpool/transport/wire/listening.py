"""Listening sockets: bound, or refused with the address that cannot be had."""

import os
import socket
from pathlib import Path

from kvpool.core.errors import CapacityError


def open_tcp(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens on TCP; raises CapacityError when the address is in use or not ours."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _bound(sock, (host, port), f"{host}:{port}", backlog)


def open_unix(path: Path, backlog: int) -> socket.socket:
    """A Unix socket that only this user may open; a dead server's is replaced.

    Raises:
        CapacityError: A live server listens there, or the path cannot be used.
    """
    _remove_dead_socket(path)
    old_mask = os.umask(0o077)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(path), str(path), backlog)
    except OSError as error:
        raise CapacityError(f"cannot listen on {path}: {error}; choose another path") from error
    finally:
        os.umask(old_mask)


def _bound(sock: socket.socket, address: object, shown: str, backlog: int) -> socket.socket:
    try:
        sock.bind(address)  # type: ignore[arg-type]
        sock.listen(backlog)
    except (OSError, ValueError) as error:  # ValueError: a host or path that cannot be a name at all
        sock.close()
        raise CapacityError(f"cannot listen on {shown}: {error}; choose another address") from error
    return sock


def _remove_dead_socket(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_socket():
        raise CapacityError(f"{path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CapacityError(f"cannot use {path} as a socket: {error}; choose another path") from error
        else:
            raise CapacityError(f"another server listens on {path}; stop it or choose another path")
