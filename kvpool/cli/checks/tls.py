"""Certificates: whether they can be used, and for how long."""

from collections.abc import Iterator
from pathlib import Path

from kvpool.cli.checks.finding import Finding, fail, ok, warn
from kvpool.core.errors import SettingsError
from kvpool.ops.credentials import CA_FILE
from kvpool.ops.pem import Leaf, read_pem, read_secret
from kvpool.ops.settings import Settings, TlsSettings, is_loopback

WARN_LEFT_S = 14 * 86_400.0

_KEY = "-key.pem"


def check_tls(settings: Settings, pool_host: str) -> Iterator[Finding]:
    """Look at each certificate, with its key, that the settings name."""
    tls = settings.tls
    if not tls.enabled:
        yield _without(pool_host)
        return
    ca = tls.ca or Path(tls.dir or ".") / CA_FILE
    pairs = list(_pairs(tls))
    if not pairs:
        yield fail("TLS", f"no certificate with its key in {tls.dir or ca.parent}", f"kvpool certs {tls.dir or 'DIR'}")
    for cert, key in pairs:
        yield _one(cert, key, ca)


def judge_leaf(cert: Path, leaf: Leaf) -> Finding:
    """A certificate that can be used: for how long?"""
    seen = f"{cert}: {leaf.identity} until {leaf.until}"
    if leaf.left_s < WARN_LEFT_S:
        return warn("TLS", f"{seen}, {leaf.left_s / 86_400:.1f} days", f"kvpool certs {cert.parent}: renews it")
    return ok("TLS", seen)


def _without(pool_host: str) -> Finding:
    if is_loopback(pool_host):
        return ok("TLS", "none: this host alone")
    return warn("TLS", f"none, and {pool_host} is another host: plaintext, for anybody", "kvpool certs; --tls-dir")


def _pairs(tls: TlsSettings) -> Iterator[tuple[Path, Path]]:
    if tls.cert is not None and tls.key is not None:
        yield tls.cert, tls.key
    elif tls.dir is not None:
        for key in sorted(tls.dir.glob(f"*{_KEY}")):
            cert = key.with_name(f"{key.name.removesuffix(_KEY)}.pem")
            if cert.name != CA_FILE and cert.exists():
                yield cert, key


def _one(cert: Path, key: Path, ca: Path) -> Finding:
    from kvpool.ops.certificates import check_leaf  # noqa: PLC0415 - with TLS alone

    try:
        files = (cert, read_pem(cert, "certificate")), (key, read_secret(key, "key")), (ca, read_pem(ca, "CA"))
        return judge_leaf(cert, check_leaf(*files))
    except SettingsError as error:
        return fail("TLS", str(error), f"kvpool certs {cert.parent}")
