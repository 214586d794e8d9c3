"""What goes wrong between two sides of TLS, in words: OpenSSL has codes."""

import ssl
from collections.abc import Sequence


def handshake_problem(error: ssl.SSLError) -> str:
    """What went wrong between two sides of TLS, in words."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate shown there is not believed: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError):
        return "the other side hung up: it does not speak TLS, or does not want this caller"
    if "ALERT" in reason:  # what the other side says of ours
        return f"our certificate is refused there: {_words(reason.partition('ALERT')[2])}"
    if reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}:
        return "the other side does not speak TLS"
    return _words(reason) or str(error)


def _words(reason: str) -> str:
    return reason.replace("_", " ").strip().lower()


def peer_identities(sock: ssl.SSLSocket) -> tuple[str, ...]:
    """Whom the peer has proven to be, once the handshake is done: the URIs of its certificate, if it showed one."""
    certificate = sock.getpeercert() or {}
    names: Sequence[tuple[str, str]] = certificate.get("subjectAltName", ())  # type: ignore[assignment]
    return tuple(value for kind, value in names if kind == "URI")
