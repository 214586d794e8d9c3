"""What this process proves who it is with, and whom it believes: files, read again when they have changed.

Certificates are those of TLS; clients may show a token instead. Whoever is being talked to goes on with what was read
when the connection was made: new files count for new connections.
"""

import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool.core.errors import AuthenticationError, SettingsError
from kvpool.core.identities import principal_of_identity
from kvpool.ops.logging import get_logger
from kvpool.ops.pem import Leaf, read_pem, read_secret
from kvpool.ops.settings import TlsSettings
from kvpool.ops.tokens import check_token

CA_FILE = "ca.pem"
EXPIRES_SOON_S = 14 * 86_400.0

log = get_logger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Where credentials are: certificate and key, or neither."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    token: Path | None = None

    def paths(self) -> list[Path]:
        """All there are."""
        return [path for path in (self.ca, self.cert, self.key, self.token) if path is not None]


@dataclass(frozen=True, slots=True, repr=False)
class Loaded:
    """What the files held. Certificates and keys as PEM, for gRPC; ``files`` for Python's own TLS."""

    stamp: Stamp
    ca: bytes
    cert: bytes | None
    key: bytes | None
    token: str
    leaf: Leaf | None
    client: ssl.SSLContext
    server: ssl.SSLContext
    server_with_tokens: ssl.SSLContext


class Credentials:
    """The credentials of one process, current at any time. Thread-safe.

    Args:
        files: Where they are.
        token: A token given as such.

    Raises:
        SettingsError: What cannot be used, of which file, and the fix.
    """

    def __init__(self, files: CredentialFiles, token: str = "") -> None:
        self._files = files
        self._token = check_token(token) if token else ""
        self._lock = threading.Lock()
        self._failed: Stamp | None = None
        self._loaded = self._load(self._stamp())

    def current(self) -> Loaded:
        """What is in the files now; what was there before while that cannot be used."""
        try:
            stamp = self._stamp()
        except OSError:
            return self._loaded  # being replaced, or gone: the next connection looks again
        if stamp in (self._loaded.stamp, self._failed):
            return self._loaded
        with self._lock:
            if stamp not in (self._loaded.stamp, self._failed):
                self._reload(stamp)
            return self._loaded

    @property
    def identity(self) -> str:
        """Who this process is; empty without a certificate."""
        leaf = self._loaded.leaf
        return "" if leaf is None else leaf.identity

    def client_context(self) -> ssl.SSLContext:
        """For connections made now; the caller compares whom they lead to."""
        return self.current().client

    def server_context(self, *, tokens: bool) -> ssl.SSLContext:
        """For connections accepted now; with ``tokens`` a peer may come without a certificate."""
        loaded = self.current()
        return loaded.server_with_tokens if tokens else loaded.server

    def toward(self, server: str) -> "TlsPeer":
        """These credentials, for connections to the server with the identity ``server``."""
        return TlsPeer(self, server)

    def _stamp(self) -> Stamp:
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in map(os.stat, self._files.paths()))

    def _reload(self, stamp: Stamp) -> None:
        try:
            loaded = self._load(stamp)
        except SettingsError as error:
            # Half of a pair has been replaced, say: then the stamp changes once more.
            self._failed = stamp
            log.warning("credentials_kept", reason=str(error))
            return
        if loaded.leaf is not None and loaded.leaf.identity != self.identity:
            self._failed = stamp
            log.warning("credentials_kept", reason=f"they are of {loaded.leaf.identity}, not {self.identity}")
            return
        self._loaded = loaded
        log.info("credentials_renewed", identity=self.identity, until=loaded.leaf.until if loaded.leaf else "")

    def _load(self, stamp: Stamp) -> Loaded:
        files = self._files
        from kvpool.ops.certificates import check_leaf  # noqa: PLC0415 - a large library, which plaintext does without

        ca = read_pem(files.ca, "CA")
        cert = key = leaf = None
        if files.cert is not None and files.key is not None:
            cert, key = read_pem(files.cert, "certificate"), read_secret(files.key, "key")
            leaf = check_leaf((files.cert, cert), (files.key, key), (files.ca, ca))
            if leaf.left_s < EXPIRES_SOON_S:
                log.warning("certificate_expires_soon", identity=leaf.identity, until=leaf.until)
        token = self._token
        if files.token is not None:
            token = check_token(read_secret(files.token, "token").decode(errors="replace").strip())
        try:
            contexts = [_context(files, server=server) for server in (False, True, True)]
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise SettingsError(f"{files.cert or files.ca} and what belongs to it cannot be used: {error}") from error
        contexts[-1].verify_mode = ssl.CERT_OPTIONAL
        return Loaded(stamp, ca, cert, key, token, leaf, *contexts)


@dataclass(frozen=True, slots=True)
class TlsPeer:
    """A server, and what this process goes there with.

    Attributes:
        credentials: What to show, and whom to believe.
        server: The identity that must answer.
    """

    credentials: Credentials
    server: str


def open_credentials(tls: TlsSettings, names: Sequence[str], server: str | None = None) -> Credentials | None:
    """The credentials that settings name; None without any: plaintext.

    Args:
        tls: The settings.
        names: What to look for in ``tls.dir``, without ``.pem``, the best first.
        server: Who this process must be; None: any caller.

    Raises:
        SettingsError: Files that are missing or cannot be used, or are another's; names file and fix.
    """
    if not tls.enabled:
        return None
    tls = as_first_of(tls, names)
    ca = tls.ca or (tls.dir / CA_FILE if tls.dir is not None else None)
    assert ca is not None
    files = CredentialFiles(ca, tls.cert, tls.key, tls.token_file)
    token = tls.token.get_secret_value() if tls.token is not None else ""
    try:
        credentials = Credentials(files, token)
    except OSError as error:
        raise SettingsError(f"{error.filename} cannot be read: {error.strerror}; `kvpool certs` makes it") from error
    if credentials.identity:
        _check_holder(files, credentials.identity, server)
    elif server is not None or not (token or files.token):
        raise SettingsError(f"tls names the CA {files.ca} alone: add tls.cert and tls.key, or, for clients, a token")
    return credentials


def as_first_of(tls: TlsSettings, names: Sequence[str]) -> TlsSettings:
    """``tls`` with the certificate of the first of ``names`` that its folder has; raises SettingsError for none."""
    if tls.dir is None or tls.cert is not None or tls.token is not None or tls.token_file is not None:
        return tls
    for name in names:
        if (tls.dir / f"{name}.pem").exists():
            own = {"cert": tls.dir / f"{name}.pem", "key": tls.dir / f"{name}-key.pem"}
            return tls.model_copy(update=own)
    wanted = " or ".join(f"{name}.pem" for name in names)
    raise SettingsError(f"tls.dir {tls.dir} has no {wanted}; `kvpool certs {tls.dir}` makes them")


def _check_holder(files: CredentialFiles, identity: str, server: str | None) -> None:
    if server is not None and identity != server:
        raise SettingsError(f"certificate {files.cert} is of {identity}; this process needs one of {server}")
    if server is None:
        try:
            principal_of_identity(identity)
        except AuthenticationError as error:
            raise SettingsError(f"certificate {files.cert}: {error}") from error


def _context(files: CredentialFiles, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # whoever dials compares the identity, which is more than a name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    if not server:
        context.set_alpn_protocols(["h2"])  # what gRPC asks for, should it be asked why it refused; frames need nothing
    else:
        context.num_tickets = 0  # nothing resumes a session, and a ticket would look like the beginning of a reply
    return context
