"""Kinds of values that settings have: read as people write them, checked, and with a fix where they cannot be."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import parse_duration, parse_size

SOCKET_PATH_BYTES_MAX = 107
"""``sun_path`` of Linux less its final zero."""

_STATE_SCHEMES = ("redis://", "rediss://", "redis+sentinel://", "redis+cluster://")
_POOL_URI = re.compile(r"grpc://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def usual_socket(data: dict[str, Any]) -> Path:
    """A node's Unix socket, by its id."""
    run_dir = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(run_dir) / "kvpool" if run_dir else Path(f"/tmp/kvpool-{os.getuid()}")  # noqa: S108 - per user
    return parent / f"{data['node_id']}.sock"


def _whole_pages(size_bytes: int) -> int:
    if size_bytes < PAGE_BYTES:
        raise ValueError(f"must hold at least one page of {PAGE_BYTES} bytes; write e.g. 4GiB")
    return size_bytes - size_bytes % PAGE_BYTES


def _no_or_whole_pages(size_bytes: int) -> int:
    return _whole_pages(size_bytes) if size_bytes else 0


def _pool_uri(text: str) -> str:
    for uri in text.split(","):
        match = _POOL_URI.fullmatch(uri)
        if match is None or not 1 <= int(match[1]) <= 65_535:
            raise ValueError("must be grpc://HOST:PORT; write e.g. grpc://127.0.0.1:7300, several with commas between")
    return text


def _state_url(text: str) -> str:
    if not text.startswith(_STATE_SCHEMES):
        raise ValueError("must be redis://HOST:PORT, redis+sentinel://HOST:PORT/NAME or redis+cluster://HOST:PORT")
    if ":" in text.partition("://")[2].rpartition("@")[0]:
        raise ValueError("must hold no password, which others could read; write it to a file: state_password_file")
    return text


def _node_id(text: str) -> str:
    if _NODE_ID.fullmatch(text) is None:
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-'; write e.g. node-1")
    return text


def _socket_path(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path, e.g. /run/kvpool/node-1.sock")
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"must be shorter: a Unix socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes")
    return path


def _words(value: object) -> object:
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def _off(value: object) -> object:
    return "off" if value is False else value  # YAML 1.1 reads a bare off as false


def _on_or_off(value: object) -> object:
    return "on" if value is True else _off(value)


def _audit(text: str) -> str:
    if text not in ("auto", "on", "off") and not Path(text).is_absolute():
        raise ValueError("must be auto, on, off, or an absolute path of a file to append to")
    return text


def _mapping(text: str) -> str:
    kind, _, tenant = text.partition(":")
    if text not in ("all", "off") and not (kind == "tenant" and tenant):
        raise ValueError("must be all, off, or tenant:NAME")
    return text


Port = Annotated[int, Field(ge=0, le=65_535)]
EventsPort = Annotated[int, Field(ge=0, le=65_534)]
"""There is one after it."""

EventBatches = Annotated[int, Field(ge=1, le=1_000_000)]
Size = Annotated[int, BeforeValidator(parse_size, str | int), AfterValidator(_whole_pages)]
SizeOrNone = Annotated[int, BeforeValidator(parse_size, str | int), AfterValidator(_no_or_whole_pages)]
"""0 is none."""

Pace = Annotated[int, Field(ge=0), BeforeValidator(parse_size, str | int)]
Duration = Annotated[float, Field(gt=0), BeforeValidator(parse_duration, str | float)]
Scheme = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*$")]
Schemes = Annotated[tuple[Scheme, ...], Field(min_length=1), BeforeValidator(_words)]
HugePages = Annotated[Literal["auto", "off", "require"], BeforeValidator(_off)]
PoolUri = Annotated[str, AfterValidator(_pool_uri)]
StateUrl = Annotated[str, AfterValidator(_state_url)]
NodeId = Annotated[str, AfterValidator(_node_id)]
AuditTo = Annotated[str, BeforeValidator(_on_or_off), AfterValidator(_audit)]
Mapping = Annotated[str, BeforeValidator(_off), AfterValidator(_mapping)]
SocketPath = Annotated[Path, AfterValidator(_socket_path)]
