"""Network addresses as people write them."""

from kvpool.core.errors import SettingsError


def shown_host(host: str) -> str:
    """``host`` as it stands in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def at_host(uri: str, host: str | None) -> str:
    """``uri`` as others dial it: at ``host``, where that is another than is listened on, and the same port."""
    if host is None:
        return uri
    scheme, _, address = uri.partition("://")
    return f"{scheme}://{host}:{address.rpartition(':')[2]}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, with IPv6 hosts in brackets.

    Raises:
        SettingsError: No port, or not a number from 0 to 65535.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65_535:
        raise SettingsError(f"{address!r} is not an address; write HOST:PORT, e.g. 127.0.0.1:7300")
    return host.strip("[]"), int(port)
