"""Settings: what a process can be told, and which values are possible. Validated once, then frozen.

The models are plain: `ops.sources` reads flags, the environment and files.
"""

import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from kvpool.core.limits import (
    DEADLINE_S_MAX,
    LEASE_S_MAX,
    REPLICAS_MAX,
    RESERVATION_S_MAX,
    SEGMENTS_MAX,
    STREAMS_MAX,
)
from kvpool.ops.setting_kinds import (
    AuditTo,
    Duration,
    EventBatches,
    EventsPort,
    HugePages,
    Mapping,
    NodeId,
    Pace,
    PoolUri,
    Port,
    Schemes,
    Size,
    SizeOrNone,
    SocketPath,
    StateUrl,
    usual_socket,
)
from kvpool.ops.tenant_settings import AnyTenant, TenantsByName, TenantSettings

TLS_OR_INSECURE = "TLS (--tls-dir; `kvpool certs` makes one) or --insecure"

TOMBSTONES_MAX = 1 << 24
CONNECTIONS_MAX = 65_536


def node_lock(segment_dir: Path, node_id: str) -> Path:
    """The file that a node of this name keeps locked for as long as it runs, so that there is no second one."""
    return segment_dir / f"kvpool-{node_id}.lock"


def _own_or_free(port: int | None, usual: int, grpc_port: int) -> int:
    if port is not None:
        return port
    return usual if grpc_port else 0


def is_loopback(host: str) -> bool:
    """Whether what listens there is reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_tls(info: ValidationInfo) -> bool:
    """Whether these settings are part of a whole that has TLS; `Settings` says so while it is validated."""
    return bool((info.context or {}).get("tls"))


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


class ServerSettings(Section):
    """Where a server listens, and for whom."""

    insecure: bool = False
    """Without TLS: listen beyond loopback all the same, in plaintext, for anybody."""

    listen: str = "127.0.0.1"
    """Address to listen on."""

    connections_max: Annotated[int, Field(ge=1, le=CONNECTIONS_MAX)] = 1024
    """Connections served at a time; more are refused."""

    advertise_host: str | None = None
    """Host that others dial; by default the address listened on."""

    http_listen: str = "127.0.0.1"
    """Address to serve health and metrics on: in plain HTTP on loopback, beyond it with TLS, metrics for operators."""

    audit: AuditTo = "auto"
    """Who changed what and who was refused: on (in the log), off, or a file; auto is on where callers are
    authenticated."""

    @field_validator("http_listen")
    @classmethod
    def _pages_for_this_host_alone(cls, host: str, info: ValidationInfo) -> str:
        if not (is_loopback(host) or info.data.get("insecure") or _has_tls(info)):
            raise ValueError(f"health and metrics for anybody: beyond loopback they need {TLS_OR_INSECURE}")
        return host

    @field_validator("listen")
    @classmethod
    def _loopback_alone_in_plaintext(cls, host: str, info: ValidationInfo) -> str:
        if not (is_loopback(host) or info.data.get("insecure") or _has_tls(info)):
            raise ValueError(f"listening beyond loopback needs {TLS_OR_INSECURE}; or use 127.0.0.1")
        return host

    @field_validator("advertise_host")
    @classmethod
    def _reachable(cls, host: str | None, info: ValidationInfo) -> str | None:
        if host is None and info.data.get("listen") in {"0.0.0.0", "::"}:  # noqa: S104 - refused here
            raise ValueError(f"nobody can dial {info.data['listen']}; name the host that others dial")
        return host


class MetaSettings(ServerSettings):
    """The metadata service. Durations in seconds; port 0 is any free port."""

    grpc_port: Port = 7300
    """Port of the gRPC service."""

    framed_port: Port = 7301
    """Port of the framed protocol: the hot path."""

    http_port: Port | None = None
    """Port of /healthz, /readyz and /metrics; by default 7302, or any free port where grpc_port is 0."""
    token_port: Port | None = None
    """Port of the gRPC service for clients with tokens instead of certificates; tls.tokens needs it."""

    unix_socket: SocketPath | None = None
    """Unix socket that serves the framed protocol too; none by default."""

    events_port: EventsPort | None = None
    """Port of the event stream (ZeroMQ), replays being on the next one; none by default."""

    events_replay_batches: EventBatches = 10_000
    """Event messages kept for those who missed some; whoever missed more asks for a snapshot."""

    events_hwm: EventBatches = 1_000
    """Event messages that wait for a slow subscriber; further ones are dropped for it."""

    requests_max: Annotated[int, Field(ge=1, le=CONNECTIONS_MAX)] = 256
    """Look-ups and reservations at work, or waiting for their turn, at a time; more are refused."""

    nodes_max: Annotated[int, Field(ge=1, le=SEGMENTS_MAX)] = 1024
    """Store nodes served at a time; more are refused."""

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

    expected_nodes: Annotated[int, Field(ge=0, le=SEGMENTS_MAX)] = 0
    """Nodes that must have reported after a start before an unknown block counts as absent; 0: not known, wait."""

    recovery_wait_s: Duration = 3.0
    """Without expected_nodes: how long no further node must have joined after a start."""

    recovery_deadline_s: Duration = 60.0
    """Longest time after a start that missing nodes are waited for."""

    tombstones: Annotated[int, Field(ge=0, le=TOMBSTONES_MAX)] = 65_536
    """Removed blocks remembered, so that a miss can be explained."""

    reflection: bool = False
    """Serve gRPC reflection."""

    state: StateUrl | None = None
    """Redis or Valkey that holds the pool's state, for several services to share; by default the service holds it."""

    state_password_file: Path | None = None
    """File that holds Redis's password; the user stands in the URL, as in redis://USER@HOST:PORT."""

    state_timeout_s: Duration = 1.0
    """Time that Redis gets to answer a call."""

    policy: Literal["default", "lru"] = "lru"
    """Eviction policy: lru evicts the oldest leaf, default the one that is least likely to be used again soon."""

    replicas_max: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 2
    """Copies of a block that the pool makes by itself, the first one included; 1: no others."""

    replica_read_rate: Annotated[float, Field(gt=0)] = 20.0
    """Reads of a block a second that bring it one further copy, on another node."""

    replica_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Fraction of a node's free space that further copies may take; they go first when room is needed."""

    tenants: TenantsByName = Field(default_factory=dict)
    """Limits of tenants by name: bytes, share, pins, lookups_per_s, writes_per_s."""

    tenant_default: AnyTenant = TenantSettings()
    """Limits of each tenant that tenants does not name."""

    @property
    def http_port_used(self) -> int:
        """The port to serve health and metrics on; 0: any."""
        return _own_or_free(self.http_port, 7302, self.grpc_port)

    @field_validator("node_ttl_s")
    @classmethod
    def _survives_a_lost_heartbeat(cls, ttl_s: float, info: ValidationInfo) -> float:
        heartbeat_s = info.data.get("heartbeat_s", 0.0)
        if ttl_s < 3 * heartbeat_s:
            raise ValueError(f"must be three heartbeats or more; raise it or lower heartbeat_s={heartbeat_s}")
        return ttl_s


class NodeSettings(ServerSettings):
    """A store node. Durations in seconds, sizes in bytes; port 0 is any free port."""

    node_id: NodeId = Field(default_factory=socket.gethostname)
    """Name of the node, unique in the pool; by default the host's name."""

    meta: PoolUri = "grpc://127.0.0.1:7300"
    """The metadata service to join."""

    size: Size = 1 << 30
    """Capacity of the segment, rounded down to whole pages."""

    vram: SizeOrNone = 0
    """Hold the blocks in so much memory of a GPU, in place of shared memory (size); 0: in shared memory."""

    device: Annotated[str, Field(pattern=r"^[a-z]+:[0-9]{1,3}$")] = "cuda:0"
    """The GPU whose memory vram takes, as this process numbers them."""

    segment_dir: Path = Path("/dev/shm")  # noqa: S108 - where shared memory lives
    """Directory of the segment file; memory-backed, or it is no shared memory."""

    hugepages: HugePages = "auto"
    """Huge pages for the segment: where available, never, or fail without."""

    disk: Path | None = None
    """Directory, on a local disk, for a second tier below memory: what was read is copied there; none by default."""

    disk_size: SizeOrNone = 0
    """Capacity of the disk tier, taken at the start; disk needs it."""

    data_port: Port = 7310
    """Port of the data plane: the tcp transport."""

    grpc_port: Port = 7311
    """Port of the gRPC service."""

    http_port: Port | None = None
    """Port of /healthz, /readyz and /metrics; by default 7312, or any free port where grpc_port is 0."""

    unix_socket: SocketPath = Field(default_factory=usual_socket)
    """Unix socket for clients on this host; by default in $XDG_RUNTIME_DIR/kvpool or /tmp/kvpool-UID."""

    mapping: Mapping = "all"
    """Whose clients may map this node's memory, or read it one-sided over ucx: all, off, or tenant:NAME alone."""

    ucx_plaintext: bool = False
    """With TLS: serve ucx beyond loopback all the same; what moves over it is neither encrypted nor authenticated."""

    ucx: bool = False
    """Serve the ucx transport too; needs NIXL."""

    keep_segment: bool = True
    """Leave the segment file when the node stops, so that the next start finds its blocks again."""

    join_timeout_s: Duration = 30.0
    """Time that the metadata service gets to take the node in."""

    scrub_bytes_per_s: Pace = 64 << 20
    """Pace at which stored blocks are checked in the background, e.g. 64MiB; 0 turns the scrub off."""

    scrub_interval_s: Duration = 600.0
    """Time from the start of one scrub to the start of the next, for segments scrubbed sooner."""

    quarantine_s: Duration = 30.0
    """How long memory rests, before it is used again, whose writer or reader of an earlier run may still be alive."""

    drain_timeout_s: Duration = 30.0
    """Time that transfers under way get to end when the node is asked to stop."""

    @field_validator("ucx")
    @classmethod
    def _where_it_can_be(cls, ucx: bool, info: ValidationInfo) -> bool:
        if ucx and info.data.get("vram"):
            raise ValueError("GPU memory is not served over ucx; leave ucx out, or vram")
        known = info.data.get("ucx_plaintext") or info.data.get("insecure") or is_loopback(info.data.get("listen", ""))
        if ucx and _has_tls(info) and not known:
            raise ValueError(
                "what moves over UCX is not encrypted by TLS; add --ucx-plaintext if the network is trusted"
            )
        return ucx

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the node's memory, be it shared or a GPU's."""
        return self.vram or self.size

    @property
    def http_port_used(self) -> int:
        """The port to serve health and metrics on; 0: any."""
        return _own_or_free(self.http_port, 7312, self.grpc_port)

    @field_validator("disk_size")
    @classmethod
    def _with_disk(cls, size_bytes: int, info: ValidationInfo) -> int:
        disk = info.data.get("disk")
        if disk is not None and not size_bytes:
            raise ValueError(f"disk is {disk}: say how much of it to use; write e.g. 100GiB")
        if disk is None and size_bytes:
            raise ValueError("there is no disk to use; name a directory with disk, or leave both out")
        return size_bytes


class ClientSettings(Section):
    """How the commands, and programs that ask for it, reach a pool."""

    pool: PoolUri = "grpc://127.0.0.1:7300"
    """The pool's metadata service."""

    transports: Schemes = ("shm", "tcp")
    """Transports to use, best first."""

    timeout_s: Annotated[Duration, Field(le=DEADLINE_S_MAX)] = 5.0
    """Deadline of a call that names none."""

    streams: Annotated[int, Field(ge=1, le=STREAMS_MAX)] = 2
    """Threads, or connections, that one large transfer may use."""


class TlsSettings(Section):
    """What this process proves who it is with, and whom it believes; without any of it, it speaks plaintext."""

    model_config = ConfigDict(hide_input_in_errors=True)

    dir: Path | None = None
    """Directory that `kvpool certs` made: ca.pem, and a certificate with its key for whoever runs here."""

    ca: Path | None = None
    """CA of all the pool's certificates, in PEM; by default ca.pem in tls.dir."""

    cert: Path | None = None
    """Certificate of this process, in PEM; by default the one in tls.dir."""

    key: Path | None = None
    """Its private key, in PEM, for nobody else to read."""

    tokens: Path | None = None
    """Servers: file of the tokens that clients may show instead of certificates, read again when it changes."""

    token: SecretStr | None = None
    """Clients: the token to show instead of a certificate; better in a file."""

    token_file: Path | None = None
    """Clients: file with that token, for nobody else to read."""

    @property
    def enabled(self) -> bool:
        """Whether there is TLS."""
        return self.dir is not None or self.ca is not None

    @field_validator("cert", "tokens", "token", "token_file")
    @classmethod
    def _over_tls(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("dir") is None and info.data.get("ca") is None:
            raise ValueError("needs TLS: name a CA with tls.ca, or a directory with tls.dir")
        return value

    @field_validator("key")
    @classmethod
    def _with_certificate(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if (key is None) != (info.data.get("cert") is None):
            raise ValueError("a certificate and its key go together: name both tls.cert and tls.key")
        return key

    @field_validator("token_file")
    @classmethod
    def _one_of_them(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and (info.data.get("token") is not None or info.data.get("cert") is not None):
            raise ValueError("one proof is enough: name a token, a file with one, or a certificate")
        return path


class LogSettings(Section):
    """What is logged to standard error, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    format: Literal["auto", "console", "json"] = "auto"
    """key=value (console) or JSON; auto is console on a terminal, else JSON."""


class Settings(Section):
    """All settings of a process, and the source of each that is not a default."""

    meta: MetaSettings = Field(default_factory=MetaSettings)
    node: NodeSettings = Field(default_factory=NodeSettings)
    client: ClientSettings = Field(default_factory=ClientSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
