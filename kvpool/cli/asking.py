"""What `kvpool explain` is asked: reads hashes and namespaces as people give them."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvpool.core.errors import UsageError
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX
from kvpool.core.namespace import Namespace, parse_namespace

PREFIX_DIGITS_MIN = 8
REQUEST_BYTES_MAX = 128 * MATCH_BLOCKS_MAX

_HEX = re.compile(r"[0-9A-Fa-f]+")

Where = Namespace | bytes | str | None


def read_hashes(single: str | None, request: str | None, what: str = "--hash") -> list[bytes]:
    """The hashes of ``--hash`` (or what else it is called), or of the file, or standard input (-), of ``--request``."""
    if single is not None:
        return [_hash(single, what)]
    assert request is not None
    try:
        text = sys.stdin.read(REQUEST_BYTES_MAX) if request == "-" else _read(Path(request))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--request {request!r} cannot be read: {error}") from error
    hashes = [_hash(word, f"--request {request}, hash {i}") for i, word in enumerate(_words(text, request))]
    if not 1 <= len(hashes) <= MATCH_BLOCKS_MAX:
        raise UsageError(f"--request {request} has {len(hashes)} hashes; give from 1 to {MATCH_BLOCKS_MAX}")
    return hashes


def find_where(text: str, namespaces: Mapping[str, str], flag: str = "--namespace") -> Namespace | bytes:
    """The namespace meant: a file with its document, its id, or the first digits of an open one's."""
    path = Path(text)
    if _HEX.fullmatch(text) is None or path.is_file():
        try:
            return parse_namespace(_read(path).encode())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{flag} {text!r} is no id, and as a file cannot be read: {error}") from error
    if len(text) == 2 * HASH_BYTES:
        return bytes.fromhex(text)
    meant = [namespace for namespace in namespaces if namespace.startswith(text.lower())]
    if len(text) < PREFIX_DIGITS_MIN or len(meant) != 1:
        shown = ", ".join(namespace[:16] for namespace in (meant or namespaces)) or "none"
        raise UsageError(
            f"{flag} {text}: {len(meant)} namespaces begin like that; give {PREFIX_DIGITS_MIN} digits or more of "
            f"one that is open: {shown}"
        )
    return bytes.fromhex(meant[0])


def _read(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(REQUEST_BYTES_MAX)


def _words(text: str, request: str) -> list[str]:
    if not text.lstrip().startswith("["):
        return text.split()
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise UsageError(f"--request {request} is no JSON list of hashes: {error}") from error


def _hash(text: str, what: str) -> bytes:
    text = text.removeprefix("0x")
    if _HEX.fullmatch(text) is None or len(text) > 2 * HASH_BYTES:
        raise UsageError(f"{what} is {text[:80]!r}; a block hash is {2 * HASH_BYTES} hex digits")
    if len(text) < 2 * HASH_BYTES:
        raise UsageError(
            f"{what} has {len(text)} digits; give all {2 * HASH_BYTES}: the pool finds blocks by their whole hash, "
            "and would have to walk through all it knows for a part of one"
        )
    return bytes.fromhex(text)
