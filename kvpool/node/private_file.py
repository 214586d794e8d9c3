"""How a node opens the files it keeps: for this user only, and never through a link that another has planted."""

import os
from pathlib import Path

from kvpool.core.errors import CapacityError


def open_private(path: Path, what: str) -> int:
    """A descriptor, the caller's to close, of the file at ``path``, made when absent; raises CapacityError."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CapacityError(f"cannot keep {what} in {path}: {error}; choose another segment_dir") from error
