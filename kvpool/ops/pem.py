"""Files of certificates, keys and tokens, read within limits; secrets only where nobody else can read them."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvpool.core.errors import SettingsError

PEM_BYTES_MAX = 1 << 20
"""More than any certificate with its chain, or a bundle of CAs."""

OTHERS_MAY_READ = 0o007


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate that says who its holder is.

    Attributes:
        identity: The ``kvpool://`` URI in it.
        until: When it expires, in UTC.
        left_s: How long that is from now.
    """

    identity: str
    until: str
    left_s: float


def read_pem(path: Path, what: str) -> bytes:
    """A file of certificates; raises SettingsError."""
    return _read(path, what)[0]


def read_secret(path: Path, what: str) -> bytes:
    """A file that nobody else may read; raises SettingsError."""
    data, mode = _read(path, what)
    if mode & OTHERS_MAY_READ:
        raise SettingsError(f"{what} {path} can be read by others (mode {mode:04o}): chmod 600 {path}")
    return data


def _read(path: Path, what: str) -> tuple[bytes, int]:
    """What a file holds, and its permissions."""
    try:
        with path.open("rb") as file:
            data, mode = file.read(PEM_BYTES_MAX + 1), os.fstat(file.fileno()).st_mode & 0o777
    except OSError as error:
        raise SettingsError(f"{what} {path} cannot be read: {error.strerror}; `kvpool certs` makes one") from error
    if len(data) > PEM_BYTES_MAX:
        raise SettingsError(f"{what} {path} has more than {PEM_BYTES_MAX} bytes; it is no such file")
    return data, mode
