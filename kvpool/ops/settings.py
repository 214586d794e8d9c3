"""Settings: decides what a process runs with, and remembers where each value came from.

Flag before environment (``KVPOOL_META__GRPC_PORT``) before file before default; validated once, then frozen.
The models are plain: only ``load_settings`` reads the environment and files.
"""

import difflib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvpool.core.errors import SettingsError
from kvpool.core.limits import DEADLINE_S_MAX, LEASE_S_MAX, PAGE_BYTES, RESERVATION_S_MAX, STREAMS_MAX
from kvpool.core.units import parse_duration, parse_size

CONFIG_VARIABLE = "KVPOOL_CONFIG"
"""The environment variable that names the file when no ``--config`` does."""

SOCKET_PATH_BYTES_MAX = 107
"""``sun_path`` of Linux less its final zero."""

TOMBSTONES_MAX = 1 << 24
CONNECTIONS_MAX = 65_536
_PREFIX = "KVPOOL_"
_POOL_URI = re.compile(r"grpc://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A Kubernetes service named kvpool-meta puts variables like KVPOOL_META_PORT_7300_TCP_ADDR into every pod.
_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)|_PORT=(tcp|udp|sctp)://")


def _whole_pages(size_bytes: int) -> int:
    if size_bytes < PAGE_BYTES:
        raise ValueError(f"must hold at least one page of {PAGE_BYTES} bytes; write e.g. 4GiB")
    return size_bytes - size_bytes % PAGE_BYTES


def _pool_uri(text: str) -> str:
    match = _POOL_URI.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= 65_535:
        raise ValueError("must be grpc://HOST:PORT; write e.g. grpc://127.0.0.1:7300")
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


def _unix_socket(data: dict[str, Any]) -> Path:
    run_dir = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(run_dir) / "kvpool" if run_dir else Path(f"/tmp/kvpool-{os.getuid()}")  # noqa: S108 - per user
    return parent / f"{data['node_id']}.sock"


Port = Annotated[int, Field(ge=0, le=65_535)]
Size = Annotated[int, BeforeValidator(parse_size, str | int), AfterValidator(_whole_pages)]
Duration = Annotated[float, Field(gt=0), BeforeValidator(parse_duration, str | float)]
Scheme = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*$")]
PoolUri = Annotated[str, AfterValidator(_pool_uri)]
NodeId = Annotated[str, AfterValidator(_node_id)]
SocketPath = Annotated[Path, AfterValidator(_socket_path)]


class _Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


class _ServerSettings(_Section):
    """Where a server listens, and for whom."""

    insecure: bool = False
    """Listen beyond loopback without TLS or authentication."""

    listen: str = "127.0.0.1"
    """Address to listen on."""

    connections_max: Annotated[int, Field(ge=1, le=CONNECTIONS_MAX)] = 1024
    """Connections served at a time; more are refused."""

    @field_validator("listen")
    @classmethod
    def _loopback_unless_insecure(cls, host: str, info: ValidationInfo) -> str:
        if not _is_loopback(host) and not info.data.get("insecure"):
            raise ValueError("listening beyond loopback needs --insecure (TLS comes later); or use 127.0.0.1")
        return host


class MetaSettings(_ServerSettings):
    """The metadata service. Durations in seconds; port 0 is any free port."""

    grpc_port: Port = 7300
    """Port of the gRPC service."""

    framed_port: Port = 7301
    """Port of the framed protocol: the hot path."""

    unix_socket: SocketPath | None = None
    """Unix socket that serves the framed protocol too; none by default."""

    lease_max_s: Annotated[Duration, Field(le=LEASE_S_MAX)] = 30.0
    """Longest lease granted; longer ones are shortened to it."""

    lease_cap: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the pool's capacity that leases may hold while it is more than 95 % full; past it matches shorten."""

    reservation_ttl_s: Annotated[Duration, Field(le=RESERVATION_S_MAX)] = 30.0
    """Time a writer has from reserve to commit."""

    heartbeat_s: Duration = 1.0
    """Interval at which nodes report."""

    node_ttl_s: Duration = 10.0
    """Silence after which a node counts as lost."""

    tombstones: Annotated[int, Field(ge=0, le=TOMBSTONES_MAX)] = 65_536
    """Removed blocks remembered, so that a miss can be explained."""

    reflection: bool = False
    """Serve gRPC reflection."""

    policy: Literal["lru"] = "lru"
    """Eviction policy."""

    @field_validator("node_ttl_s")
    @classmethod
    def _survives_a_lost_heartbeat(cls, ttl_s: float, info: ValidationInfo) -> float:
        heartbeat_s = info.data.get("heartbeat_s", 0.0)
        if ttl_s < 3 * heartbeat_s:
            raise ValueError(f"must be three heartbeats or more; raise it or lower heartbeat_s={heartbeat_s}")
        return ttl_s


class NodeSettings(_ServerSettings):
    """A store node. Durations in seconds, sizes in bytes; port 0 is any free port."""

    node_id: NodeId = Field(default_factory=socket.gethostname)
    """Name of the node, unique in the pool; by default the host's name."""

    meta: PoolUri = "grpc://127.0.0.1:7300"
    """The metadata service to join."""

    size: Size = 1 << 30
    """Capacity of the segment, rounded down to whole pages."""

    segment_dir: Path = Path("/dev/shm")  # noqa: S108 - where shared memory lives
    """Directory of the segment file; memory-backed, or it is no shared memory."""

    hugepages: Annotated[Literal["auto", "off", "require"], BeforeValidator(_off)] = "auto"
    """Huge pages for the segment: where available, never, or fail without."""

    data_port: Port = 7310
    """Port of the data plane: the tcp transport."""

    grpc_port: Port = 7311
    """Port of the gRPC service."""

    unix_socket: SocketPath = Field(default_factory=_unix_socket)
    """Unix socket for clients on this host; by default in $XDG_RUNTIME_DIR/kvpool or /tmp/kvpool-UID."""

    advertise_host: str | None = None
    """Host that clients dial; by default the address listened on."""

    keep_segment: bool = True
    """Leave the segment file when the node stops, so that the next start finds its blocks again."""

    join_timeout_s: Duration = 30.0
    """Time that the metadata service gets to take the node in."""

    drain_timeout_s: Duration = 30.0
    """Time that transfers under way get to end when the node is asked to stop."""

    @field_validator("advertise_host")
    @classmethod
    def _reachable(cls, host: str | None, info: ValidationInfo) -> str | None:
        if host is None and info.data.get("listen") in {"0.0.0.0", "::"}:  # noqa: S104 - refused here
            raise ValueError(f"nobody can dial {info.data['listen']}; name the host that clients dial")
        return host


class ClientSettings(_Section):
    """How the commands, and programs that ask for it, reach a pool."""

    pool: PoolUri = "grpc://127.0.0.1:7300"
    """The pool's metadata service."""

    transports: Annotated[tuple[Scheme, ...], Field(min_length=1), BeforeValidator(_words)] = ("shm", "tcp")
    """Transports to use, best first."""

    timeout_s: Annotated[Duration, Field(le=DEADLINE_S_MAX)] = 5.0
    """Deadline of a call that names none."""

    streams: Annotated[int, Field(ge=1, le=STREAMS_MAX)] = 2
    """Threads, or connections, that one large transfer may use."""


class LogSettings(_Section):
    """What is logged to standard error, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    format: Literal["auto", "console", "json"] = "auto"
    """key=value (console) or JSON; auto is console on a terminal, else JSON."""


class Settings(_Section):
    """All settings of a process, and the source of each that is not a default."""

    meta: MetaSettings = Field(default_factory=MetaSettings)
    node: NodeSettings = Field(default_factory=NodeSettings)
    client: ClientSettings = Field(default_factory=ClientSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)


class Setting(NamedTuple):
    """The value of one dotted key, and the source that gave it."""

    key: str
    value: object
    source: str


_SECTIONS: dict[str, type[_Section]] = {
    "meta": MetaSettings,
    "node": NodeSettings,
    "client": ClientSettings,
    "log": LogSettings,
}


def load_settings(
    config: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Read, merge and validate all sources.

    Args:
        config: YAML file; by default the one that ``KVPOOL_CONFIG`` names, else none.
        overrides: Values of flags by dotted key, e.g. ``{"meta.grpc_port": 7300}``; None is a flag not given.
        environ: The environment; by default the process's. An empty variable counts as not set.

    Raises:
        SettingsError: An unknown key or a value that cannot be; names key, value, source and fix.
    """
    environ = os.environ if environ is None else environ
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    sources = (_from_file(config) if config else [], _from_environment(environ), _from_flags(overrides or {}))
    given = {setting.key: setting for source in sources for setting in source}
    document: dict[str, dict[str, object]] = {section: {} for section in _SECTIONS}
    for key, value, _ in given.values():
        section, name = key.split(".")
        document[section][name] = value
    try:
        settings = Settings.model_validate(document)
    except ValidationError as error:
        causes = [cause for cause in error.errors() if cause["type"] != "default_factory_not_called"]
        raise SettingsError("; also ".join(_explain(cause, given) for cause in causes)) from error
    settings._sources.update({key: source for key, _, source in given.values()})
    return settings


def effective(settings: Settings) -> list[Setting]:
    """Every setting in force with its source, section by section."""
    document = settings.model_dump(mode="json")
    return [
        Setting(key, value, settings._sources.get(key, "default"))
        for section, values in document.items()
        for name, value in values.items()
        for key in [f"{section}.{name}"]
    ]


def known_keys() -> list[str]:
    """Every dotted key, e.g. ``meta.grpc_port``."""
    return [f"{section}.{name}" for section, model in _SECTIONS.items() for name in model.model_fields]


def field_of(key: str) -> FieldInfo:
    """The declaration of a dotted key: its type, its default and its description."""
    section, name = key.split(".")
    return _SECTIONS[section].model_fields[name]


def flag_name(key: str) -> str:
    """The flag of a dotted key: ``meta.grpc_port`` is ``--grpc-port``, ``log.level`` is ``--log-level``."""
    section, name = key.split(".")
    flag = name.removesuffix("_s").replace("_", "-")
    return f"--log-{flag}" if section == "log" else f"--{flag}"


def variable_name(key: str) -> str:
    """The environment variable of a dotted key: ``meta.grpc_port`` is ``KVPOOL_META__GRPC_PORT``."""
    return _PREFIX + key.replace(".", "__").upper()


def _from_flags(overrides: Mapping[str, object]) -> list[Setting]:
    return [
        Setting(_known(key, value, "flags"), value, f"flag {flag_name(key)}")
        for key, value in overrides.items()
        if value is not None
    ]


def _from_environment(environ: Mapping[str, str]) -> list[Setting]:
    given = []
    for name, value in environ.items():
        ours = name.startswith(_PREFIX) and name != CONFIG_VARIABLE
        if ours and value and _KUBERNETES.search(f"{name}={value}") is None:
            key = name.removeprefix(_PREFIX).lower().replace("__", ".")
            source = f"environment variable {name}"
            given.append(Setting(_known(key, value, source, variable_name), value, source))
    return given


def _from_file(path: Path) -> list[Setting]:
    source = f"file {path}"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"{source}: {problem}; `kvpool config default` prints a valid file") from error
    given = []
    for section, content in _mapping(document, "the document", source).items():
        if section not in _SECTIONS:
            _known(str(section), content, source)
        for name, value in _mapping(content, str(section), source).items():
            given.append(Setting(_known(f"{section}.{name}", value, source), value, source))
    return given


def _mapping(content: object, what: str, source: str) -> dict[object, object]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{what} = {content!r} ({source}): must hold keys, e.g. grpc_port: 7300")
    return content


def _known(key: str, value: object, source: str, spell: Callable[[str], str] = str) -> str:
    known = known_keys()
    if key in known:
        return key
    namesakes = [other for other in known if other.split(".")[1] == key.rsplit(".", maxsplit=1)[-1]]
    nearest = difflib.get_close_matches(key, [*_SECTIONS, *known], n=1, cutoff=0.75) or namesakes
    fix = f"did you mean {spell(nearest[0])}?" if nearest else "`kvpool config default` lists every key"
    raise SettingsError(f"{key} = {value!r} ({source}): unknown key; {fix}")


def _explain(cause: ErrorDetails, given: Mapping[str, Setting]) -> str:
    key = ".".join(str(part) for part in cause["loc"][:2])
    _, value, source = given.get(key, Setting(key, cause["input"], "default"))
    problem = cause.get("ctx", {}).get("error")
    if problem is None:
        problem = f"{cause['msg'][0].lower()}{cause['msg'][1:]}; the default is {field_of(key).default}"
    return f"{key} = {value!r} ({source}): {problem}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
