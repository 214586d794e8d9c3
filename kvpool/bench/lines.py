"""Reads files of one record a line, plain or gzip, without ever holding more than a line."""

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from kvpool.core.errors import UsageError

LINE_BYTES_MAX = 4 << 20

_GZIP_MAGIC = b"\x1f\x8b"


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, from 1.

    Raises:
        UsageError: The file cannot be read, is damaged, or has a line beyond `LINE_BYTES_MAX`; names file and line.
    """
    number = 0
    try:
        with _open(path) as stream:
            while raw := stream.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(raw) > LINE_BYTES_MAX:
                    raise UsageError(
                        f"{path.name}, line {number} is longer than {LINE_BYTES_MAX} bytes; put one request on a line"
                    )
                yield number, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{path.name}, after line {number}: damaged or cut-off gzip data ({error}); fetch the file again"
        ) from error
    except OSError as error:
        raise UsageError(f"trace {str(path)!r} cannot be read: {error}; give a readable file") from error


def _open(path: Path) -> BufferedReader | gzip.GzipFile:
    with path.open("rb") as file:
        packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(path) if packed else path.open("rb")
