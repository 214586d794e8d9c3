"""Tokens: secrets that a client shows instead of a certificate. Servers keep no more than their digests.

A server's file has a line for each: ``DIGEST IDENTITY``, the digest being SHA-256 in hex; ``#`` begins a comment. It is
read again when it has changed. Nodes and the metadata service have certificates: a token never makes one.
"""

import hashlib
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

from kvpool.core.errors import AuthenticationError, SettingsError
from kvpool.core.identities import principal_of_identity
from kvpool.core.principals import Principal, Role
from kvpool.ops.logging import get_logger
from kvpool.ops.pem import read_pem

TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 512
_RANDOM_BYTES = 32
_DIGEST_CHARS = 64

log = get_logger(__name__)


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def token_digest(token: str) -> str:
    """What a server keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def check_token(token: str) -> str:
    """``token``, if it can be one; raises SettingsError, which does not show it."""
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable():
        raise SettingsError(
            f"a token has {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} visible characters on one line; "
            "`kvpool certs DIR --token TENANT/NAME` makes one"
        )
    return token


class Tokens:
    """The tokens that a server takes. Thread-safe.

    Args:
        path: Its file.

    Raises:
        SettingsError: The file cannot be read, or a line of it is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp = self._stat()
        self._holders = _read(path)

    def holder(self, token: str) -> Principal:
        """Whose token this is; raises AuthenticationError when it is nobody's.

        What is looked up is a digest: how long that takes says nothing of the tokens that there are.
        """
        self._refresh()
        found = self._holders.get(token_digest(token))
        if found is None:
            raise AuthenticationError("this token is nobody's here: it was taken back, or is another pool's")
        return found

    def _refresh(self) -> None:
        stamp = self._stat()
        if stamp is None or stamp == self._stamp:
            return
        with self._lock:
            if stamp == self._stamp:
                return
            try:
                self._holders = _read(self._path)
            except SettingsError as error:
                log.warning("tokens_kept", reason=str(error))
            self._stamp = stamp

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> Mapping[str, Principal]:
    holders = {}
    text = read_pem(path, "file of tokens").decode(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            digest, identity = words
            holder = principal_of_identity(identity)
        except (ValueError, AuthenticationError) as error:
            raise SettingsError(f"{path}, line {number}, is not DIGEST IDENTITY: {error}") from error
        if Role.NODE in holder.roles:
            raise SettingsError(f"{path}, line {number}: {identity} is a node's; nodes have certificates, not tokens")
        if len(digest) != _DIGEST_CHARS:
            raise SettingsError(f"{path}, line {number}: the digest has {len(digest)} digits, not {_DIGEST_CHARS}")
        holders[digest.lower()] = holder
    return holders
