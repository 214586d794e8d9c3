"""Certificates for attackers: of the right CA with the wrong time or name, or of another CA altogether."""

import datetime as dt
import socket
import ssl
from contextlib import contextmanager
from pathlib import Path

from kvpool.core.identities import META, client_identity, node_identity
from kvpool.ops.addresses import split_address
from kvpool.ops.credentials import CredentialFiles, Credentials
from kvpool.ops.curve import make_keys
from kvpool.ops.issuing import Authority

DAY = dt.timedelta(days=1)
LONG_S = 20.0


class Pki:
    """A folder as `kvpool certs` makes it, for nodes n0 and n1, with all that should not be believed in ``bad``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "certs"
        self.authority = Authority(self.folder, 30)
        holders = {
            "meta": META,
            "node-n0": node_identity("n0"),
            "node-n1": node_identity("n1"),
            "client": client_identity("acme", "engine"),
            "admin": "kvpool://admin/admin",
            "observer": "kvpool://observer/watch",
        }
        for name, identity in holders.items():
            self.issue(name, identity)
        make_keys(self.folder, holders)
        foreign = Authority(folder / "foreign", 30)
        foreign.issue("client", client_identity("acme", "engine"), renew=False)
        self.foreign = folder / "foreign"
        with self.at(-400 * DAY):
            self.issue("expired", client_identity("acme", "engine"))
        with self.at(400 * DAY):
            self.issue("early", client_identity("acme", "engine"))
        self.issue("stranger", "https://example.org/engine")

    def issue(self, name, identity):
        self.authority.issue(name, identity, renew=True)

    @contextmanager
    def at(self, shift):
        """What is issued meanwhile is issued then."""
        before, self.authority._now = self.authority._now, self.authority._now + shift
        yield
        self.authority._now = before

    @property
    def ca(self):
        return self.folder / "ca.pem"

    def pair(self, name):
        """Certificate and key: a folder's by its name, or ``foreign``."""
        folder = self.foreign if name == "foreign" else self.folder
        name = "client" if name == "foreign" else name
        return folder / f"{name}.pem", folder / f"{name}-key.pem"

    def files(self, name):
        return CredentialFiles(self.ca, *self.pair(name))

    def credentials(self, name):
        return Credentials(self.files(name))

    def context(self, name=None):
        """What an attacker dials with: it does not look at its own certificate first."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.ca)
        if name is not None:
            context.load_cert_chain(*self.pair(name))
        return context

    @contextmanager
    def dial(self, uri, name=None):
        """A TLS connection to ``uri``, handshake done."""
        with (
            socket.create_connection(split_address(uri.partition("://")[2]), LONG_S) as sock,
            self.context(name).wrap_socket(sock) as secured,
        ):
            yield secured
