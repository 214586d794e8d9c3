"""Certificates as files hold them: who they are for, and whether this process can use them at all."""

import datetime as dt  # noqa: TID251 - certificates are valid from one time of day to another
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvpool.core.errors import SettingsError
from kvpool.ops.pem import Leaf

_UNUSABLE = (
    ValueError,
    TypeError,  # a key that has a password
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What the library says of files that are damaged, or made of what it does not know: they have no common base."""

RENEW = "`kvpool certs` renews it"


def check_leaf(cert: tuple[Path, bytes], key: tuple[Path, bytes], ca: tuple[Path, bytes]) -> Leaf:
    """The certificate of this process, checked against its key, its CA and the time; files come as (path, bytes).

    Raises:
        SettingsError: What is wrong, of which file, and the fix.
    """
    path, pem = cert
    chain = parse_pem(path, pem)
    leaf, authorities = chain[0], parse_pem(*ca)
    private = load_key(*key)
    try:
        fits = _public(private.public_key()) == _public(leaf.public_key())
    except _UNUSABLE as error:
        raise SettingsError(f"certificate {path} has a key that cannot be used: {error}; {RENEW}") from error
    if not fits:
        raise SettingsError(f"key {key[0]} is not that of certificate {path}: take both from one run of `kvpool certs`")
    if not any(_issued(child, issuer) for child in chain for issuer in authorities):
        raise SettingsError(f"certificate {path} is not of the CA in {ca[0]}: take both from one folder")
    now = dt.datetime.now(dt.UTC)
    if leaf.not_valid_before_utc > now:
        raise SettingsError(f"certificate {path} is not valid before {shown(leaf.not_valid_before_utc)}: set the clock")
    if leaf.not_valid_after_utc <= now:
        raise SettingsError(f"certificate {path} expired at {shown(leaf.not_valid_after_utc)}; {RENEW}")
    left_s = (leaf.not_valid_after_utc - now).total_seconds()
    return Leaf(identity_in(path, leaf), shown(leaf.not_valid_after_utc), left_s)


def load_key(path: Path, pem: bytes) -> PrivateKeyTypes:
    """The private key of a file; raises SettingsError."""
    try:
        return load_pem_private_key(pem, None)
    except _UNUSABLE as error:
        raise SettingsError(f"key {path} is no private key in PEM without a password: {error}") from error


def parse_pem(path: Path, pem: bytes) -> list[x509.Certificate]:
    """The certificates of a file, one at least; raises SettingsError."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except _UNUSABLE as error:
        raise SettingsError(f"{path} holds no certificate in PEM: {error}") from error


def identity_in(path: Path, certificate: x509.Certificate) -> str:
    """The ``kvpool://`` URI of a certificate; raises SettingsError when it has none, or several."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith("kvpool://")]
    except (x509.ExtensionNotFound, *_UNUSABLE):
        uris = []
    if len(uris) != 1:
        raise SettingsError(f"certificate {path} has {len(uris)} names kvpool://...; it needs one: see `kvpool certs`")
    return uris[0]


def shown(moment: dt.datetime) -> str:
    """A moment, to the minute."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _issued(child: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        child.verify_directly_issued_by(issuer)
    except _UNUSABLE:
        return False
    return True


def _public(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
