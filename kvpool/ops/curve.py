"""CURVE keys, which guard the event stream as certificates do everything else: ZeroMQ knows no TLS.

    NAME.events-key     the secret key of whoever has the certificate NAME.pem: the service, an admin, an observer
    events.pub          the service's public key: what followers believe
    events-followers    a line for each follower, ``KEY IDENTITY``: whom the service serves. Read again when it changes

Keys are 40 characters of Z85, as ZeroMQ has them. They do not expire: who is taken out of the file is not served any
more, from the next connection on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvpool.core.errors import AuthenticationError, SettingsError
from kvpool.core.identities import principal_of_identity
from kvpool.core.principals import Principal, Role
from kvpool.ops.issuing import write_file
from kvpool.ops.logging import get_logger
from kvpool.ops.pem import read_pem, read_secret

SERVER = "meta"
SERVER_PUBLIC_FILE = "events.pub"
FOLLOWERS_FILE = "events-followers"
KEY_CHARS = 40

_OPERATORS = ("admin", "observer")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair, in Z85; of a follower with the public key of the service, which it believes alone."""

    public: bytes
    secret: bytes
    server: bytes = b""

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


def secret_file(folder: Path, name: str) -> Path:
    """Where the secret key of ``name`` is."""
    return folder / f"{name}.events-key"


def read_keys(path: Path) -> CurveKeys:
    """The pair with the secret key in ``path``; raises SettingsError."""
    import zmq  # noqa: PLC0415 - no part of a pool without events

    secret = _checked(path, read_secret(path, "event key").strip())
    return CurveKeys(zmq.curve_public(secret), secret)


def read_public(path: Path) -> bytes:
    """A public key; raises SettingsError."""
    return _checked(path, read_pem(path, "public event key").strip())


def follower_keys(folder: Path) -> CurveKeys:
    """An operator's keys in ``folder``; raises SettingsError."""
    for name in _OPERATORS:
        if secret_file(folder, name).exists():
            return replace(read_keys(secret_file(folder, name)), server=read_public(folder / SERVER_PUBLIC_FILE))
    wanted = " or ".join(secret_file(folder, name).name for name in _OPERATORS)
    raise SettingsError(f"tls.dir {folder} has no {wanted}: events are for observers and admins")


def make_keys(folder: Path, holders: Mapping[str, str]) -> None:
    """Keys of all ``holders``, identities by name, who follow events or publish them; those there are kept.

    Raises:
        SettingsError: A file cannot be read or written.
    """
    own = _pair(folder, SERVER)
    write_file(folder / SERVER_PUBLIC_FILE, own.public + b"\n", 0o644)
    lines = [
        f"{_pair(folder, name).public.decode()} {identity}\n"
        for name, identity in sorted(holders.items())
        if may_follow(identity)
    ]
    write_file(folder / FOLLOWERS_FILE, "".join(lines).encode(), 0o644)


def may_follow(identity: str) -> bool:
    """Whether the holder of ``identity`` may know of the blocks of all tenants."""
    try:
        return Role.OBSERVER in principal_of_identity(identity).roles
    except AuthenticationError:
        return False


class Followers:
    """Whom the service serves. Used by one thread.

    Args:
        path: The file.

    Attributes:
        refused: Callers who were not served.

    Raises:
        SettingsError: The file cannot be read, or a line of it is none.
    """

    def __init__(self, path: Path) -> None:
        self.refused = 0
        self._path = path
        self._stamp = self._stat()
        self._known = _read(path)

    def find(self, public: bytes) -> Principal | None:
        """Whose key this is; None, counted, when it is nobody's here."""
        self._refresh()
        found = self._known.get(public)
        if found is None:
            self.refused += 1
            log.warning(
                "caller_refused", socket="events", reason=f"key {public.decode(errors='replace')[:8]}… is nobody's"
            )
        return found

    def _refresh(self) -> None:
        stamp = self._stat()
        if stamp is None or stamp == self._stamp:
            return
        try:
            self._known = _read(self._path)
        except SettingsError as error:
            log.warning("followers_kept", reason=str(error))
        self._stamp = stamp

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _pair(folder: Path, name: str) -> CurveKeys:
    import zmq  # noqa: PLC0415 - no part of a pool without events

    path = secret_file(folder, name)
    if not path.exists():
        write_file(path, zmq.curve_keypair()[1] + b"\n", 0o600)
    return read_keys(path)


def _read(path: Path) -> Mapping[bytes, Principal]:
    known = {}
    text = read_pem(path, "file of followers").decode(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition(" #")[0].split()
        if not words or words[0] == "#":
            continue
        try:
            key, identity = words
            holder = principal_of_identity(identity)
        except (ValueError, AuthenticationError) as error:
            raise SettingsError(f"{path}, line {number}, is not KEY IDENTITY: {error}") from error
        if Role.OBSERVER not in holder.roles:
            raise SettingsError(f"{path}, line {number}: {identity} may not follow events; observers and admins may")
        known[_checked(path, key.encode())] = holder
    return known


def _checked(path: Path, key: bytes) -> bytes:
    if len(key) != KEY_CHARS or not key.isascii():
        raise SettingsError(f"{path} has a key of {len(key)} characters; it has {KEY_CHARS}: `kvpool certs` makes one")
    return key
