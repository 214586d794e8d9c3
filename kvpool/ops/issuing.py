"""Makes a pool's CA and the certificates of its parts, as files in one folder.

Whoever runs a part gets the folder's ``ca.pem``, its own ``NAME.pem`` and its ``NAME-key.pem``. The CA's key stays
where the folder was made: who has it can be anybody.
"""

import datetime as dt  # noqa: TID251 - certificates are valid from one time of day to another
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvpool.core.errors import SettingsError
from kvpool.ops.certificates import identity_in, load_key, parse_pem, shown
from kvpool.ops.credentials import CA_FILE
from kvpool.ops.grpc_tls import server_name
from kvpool.ops.pem import read_pem, read_secret

CA_KEY_FILE = "ca-key.pem"
CA_DAYS = 3650
RENEW_SHARE = 1 / 3
"""A certificate is renewed when less than this share of its days is left."""

_CLOCK_SKEW = dt.timedelta(minutes=5)
"""Hosts whose clocks are so far behind believe a new certificate all the same."""

_SERVERS = ("kvpool://meta", "kvpool://node/")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate of the folder.

    Attributes:
        name: Of its files.
        identity: Who it is for.
        until: When it expires.
        done: ``made``, ``renewed`` or ``kept``.
    """

    name: str
    identity: str
    until: str
    done: str


class Authority:
    """A folder with a CA, made if there is none, and the certificates that it issues.

    Args:
        folder: Where; nobody else may enter it.
        days: How long certificates are valid from now on.

    Raises:
        SettingsError: The folder or what is in it cannot be used.
    """

    def __init__(self, folder: Path, days: int) -> None:
        self._folder = folder
        self._days = days
        self._now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.is_new = not (folder / CA_FILE).exists()
            if self.is_new:
                self._make_ca()
        except OSError as error:
            raise SettingsError(f"{folder} cannot hold certificates: {error.strerror}; name another folder") from error
        self._ca = parse_pem(folder / CA_FILE, read_pem(folder / CA_FILE, "CA"))[0]
        key = load_key(folder / CA_KEY_FILE, read_secret(folder / CA_KEY_FILE, "key of the CA"))
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SettingsError(f"key {folder / CA_KEY_FILE} is not one that `kvpool certs` made; name another folder")
        self._key = key

    def names(self) -> dict[str, str]:
        """The identities of the folder's certificates, by name."""
        found = {}
        for path in sorted(self._folder.glob("*.pem")):
            if path.name != CA_FILE and not path.stem.endswith("-key"):
                found[path.stem] = identity_in(path, parse_pem(path, read_pem(path, "certificate"))[0])
        return found

    def issue(self, name: str, identity: str, *, renew: bool) -> Issued:
        """A certificate ``NAME.pem`` for ``identity``; the one there stays, unless it is old or to be renewed."""
        path = self._folder / f"{name}.pem"
        exists = path.exists()
        if exists and not renew:
            there = parse_pem(path, read_pem(path, "certificate"))[0]
            valid = there.not_valid_after_utc - there.not_valid_before_utc
            fresh = there.not_valid_after_utc - self._now > valid * RENEW_SHARE
            if fresh and identity_in(path, there) == identity and there.issuer == self._ca.subject:
                return Issued(name, identity, shown(there.not_valid_after_utc), "kept")
        certificate, key = self._make_leaf(identity)
        write_file(self._folder / f"{name}-key.pem", _key_pem(key), 0o600)
        write_file(path, certificate.public_bytes(Encoding.PEM), 0o644)
        return Issued(name, identity, shown(certificate.not_valid_after_utc), "renewed" if exists else "made")

    def _make_ca(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        # A name of its own: two CAs must not be taken for each other.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvpool CA {os.urandom(4).hex()}")])
        builder = self._builder(name, name, key, CA_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        write_file(self._folder / CA_KEY_FILE, _key_pem(key), 0o600)
        write_file(self._folder / CA_FILE, certificate.public_bytes(Encoding.PEM), 0o644)

    def _make_leaf(self, identity: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = ec.generate_private_key(ec.SECP256R1())
        uses, names = [ExtendedKeyUsageOID.CLIENT_AUTH], [x509.UniformResourceIdentifier(identity)]
        alternative: list[x509.GeneralName] = [*names]
        if identity.startswith(_SERVERS):
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
            alternative.append(x509.DNSName(server_name(identity)))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity[-64:])])
        builder = self._builder(subject, self._ca.subject, key, self._days)
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs=False), True),
            (x509.ExtendedKeyUsage(uses), False),
            (x509.SubjectAlternativeName(alternative), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self._key, hashes.SHA256()), key

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(subject_name=subject, issuer_name=issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCK_SKEW)
            .not_valid_after(self._now + dt.timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Of a CA, which signs certificates, or of somebody who proves who he is."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write ``path`` so that whoever reads it finds what was there before, or all of ``data``; raises SettingsError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        fresh.replace(path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
