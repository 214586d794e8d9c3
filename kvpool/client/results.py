"""What the client library answers: frozen records. Misses, time-outs and partial transfers are values here."""

from dataclasses import dataclass, field

import msgspec

from kvpool.client.tenants import TenantStatus
from kvpool.core.directory import Match, MissReason
from kvpool.core.members import Scrub
from kvpool.transport.wire.messages import SegmentGrant

__all__ = [
    "ClientStats",
    "DrainStatus",
    "LoadResult",
    "Match",
    "NamespaceStatus",
    "NodeStatus",
    "PoolStatus",
    "RecoveryStatus",
    "Reservation",
    "SegmentStatus",
    "ServerStatus",
    "SharedStateStatus",
    "StoreResult",
    "TenantStatus",
    "WriteResult",
]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought.

    Attributes:
        loaded: Leading blocks whose buffers hold verified bytes.
        reasons: One entry a buffer: None where it holds verified bytes, else why not; such a buffer holds garbage.
        size_bytes: Verified bytes.
    """

    loaded: int
    reasons: tuple[MissReason | None, ...] = field(repr=False)
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What a store did.

    Attributes:
        stored: Blocks written and committed.
        existing: Blocks that were stored already: the first writer wins, and these bytes were not looked at.
        in_flight: Blocks that another writer is at.
        refused: Blocks without room, or lost on the way; the pool holds nothing of them.
        missing_from: Index into the hashes of the first ancestor that the pool does not hold: store from there.
        size_bytes: Bytes committed.
    """

    stored: int
    existing: int = 0
    in_flight: int = 0
    refused: int = 0
    missing_from: int | None = None
    size_bytes: int = 0


class SharedStateStatus(msgspec.Struct, frozen=True):
    """The pool's state in Redis; see admin.proto."""

    url: str
    epoch: int
    primaries: int
    replicas: int
    lag_bytes: int
    used_bytes: int


class ServerStatus(msgspec.Struct, frozen=True):
    """One of the metadata services that share it; see admin.proto."""

    incarnation: int
    address: str
    version: str
    ping_s: float
    failures: int


class Reservation(msgspec.Struct, frozen=True, array_like=True):
    """Places for blocks, to be written by one rank each; plain data, so that it can be sent to the ranks.

    Attributes:
        namespace: Id of the namespace it is for.
        number: The write token, 0 when nothing is wanted.
        first: Index of the slice's first block in the chain it was reserved for.
        hashes: The slice's hashes, packed.
        wants: One `Want` a block.
        missing_from: See `StoreResult`.
        grants: What to write where; opaque to the caller.
        topology: Version of the nodes that the grants are of: a writer that knows others asks for them first.
    """

    namespace: bytes
    number: int
    first: int
    hashes: bytes
    wants: bytes
    missing_from: int | None
    grants: list[SegmentGrant]
    topology: int = 0


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What one rank's write of a reservation did.

    Attributes:
        committed: Indexes into the slice of the blocks written.
        failed: Those of the others.
        crowded: Whether a node had no extent long enough for some of them.
    """

    committed: tuple[int, ...]
    failed: tuple[int, ...]
    crowded: bool = False


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since the client was made.

    Attributes:
        loaded_bytes: Verified bytes, by transport.
        stored_bytes: Committed bytes, by transport.
        misses: Blocks not loaded, by reason.
        verify_failures: Blocks whose bytes were not the right ones.
        stores_refused: Blocks that a store could not place or finish.
        reconnects: Times the metadata service had to be found again.
        retries: Calls that failed and were made once more.
        retries_denied: Those that were not, because the retry budget was used up.
        overloaded: Calls that the metadata service refused, having too much to do.
        fallbacks: Nodes now reached over something slower than the transport is meant for: ucx over TCP alone.
    """

    loaded_bytes: dict[str, int]
    stored_bytes: dict[str, int]
    misses: dict[str, int]
    verify_failures: int
    stores_refused: int
    reconnects: int
    retries: int
    retries_denied: int
    overloaded: int
    fallbacks: int = 0


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """One segment, as the directory accounts for it."""

    segment_id: str
    medium: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    off: str = ""
    """Why it is out of use until its node restarts; empty while it is in use."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node; ``transport`` is what this client uses to reach it, None before its first use.

    Capacity, use and blocks are those of its memory; ``segments`` has those of its disk. ``carrier`` is what moves the
    bytes below the transport, where its name does not say so: for ucx the transports and devices that UCX has chosen.
    ``scrub`` is what the node has checked of its blocks since it started, ``fetched_bytes`` what it has copied from
    other nodes, by transport; ``moved_bytes`` what its data plane has moved: "in tcp", "out unix" and so on.
    ``version`` is that of its software.
    """

    node_id: str
    state: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    endpoints: tuple[str, ...]
    transport: str | None
    segments: tuple[SegmentStatus, ...]
    scrub: Scrub = field(default_factory=Scrub)
    carrier: str = ""
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """What a namespace holds now, and what was asked of it since the service's start.

    Attributes:
        namespace: Its id (hex).
        blocks: Entries of the directory.
        size_bytes: One copy of each of them.
        asked_blocks: Blocks that look-ups asked for.
        matched_blocks: Of these, blocks that were there.
        read_bytes: Bytes that readers were told where to find.
        stored_bytes: Bytes that writers committed.
    """

    namespace: str
    blocks: int
    size_bytes: int
    asked_blocks: int
    matched_blocks: int
    read_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class RecoveryStatus:
    """How far the directory is rebuilt; while it is, blocks that are not known are misses ``recovering``.

    Attributes:
        active: Whether nodes may have yet to report.
        nodes_reported: Nodes whose inventories are complete.
        nodes_expected: Nodes waited for; 0 when the service was not told.
        lasted_s: Seconds from the service's start to the end, or to now.
    """

    active: bool
    nodes_reported: int
    nodes_expected: int
    lasted_s: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool as its metadata service sees it.

    Attributes:
        incarnation: Of the metadata service.
        version: Of its software.
        namespaces: Documents by id (hex).
        nodes: All nodes known.
        counters: The directory's counts.
        recovery: How far the directory is rebuilt since the service's start.
        security: How the service is guarded: ``tls``, ``loopback`` (plaintext, for its host alone) or ``insecure``.
        usage: What each namespace holds.
        misses: Look-ups that ended early since the service's start, by reason.
        uptime_s: Since that start, on the service's clock: differences of counts are over differences of this.
        unix_time_s: The time of day there.
        tenants: By name.
        events: Where it publishes events: the stream, then replays and snapshots; empty when it does not.
        state: Where several services share it; None where this one holds it.
        servers: Those services.
    """

    incarnation: int
    version: str
    namespaces: dict[str, str]
    nodes: tuple[NodeStatus, ...]
    counters: dict[str, int]
    recovery: RecoveryStatus
    security: str = ""
    usage: tuple[NamespaceStatus, ...] = ()
    misses: dict[str, int] = field(default_factory=dict)
    uptime_s: float = 0.0
    unix_time_s: float = 0.0
    tenants: tuple[TenantStatus, ...] = ()
    events: tuple[str, ...] = ()
    state: SharedStateStatus | None = None
    servers: tuple[ServerStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """How far the drain of a node has come.

    Attributes:
        node_id: The node.
        state: copying, drained (it stays, or is about to leave), left, cancelled, or lost (it died first).
        blocks: Blocks that only this node held when it began, and ``size_bytes``.
        size_bytes: Their slots.
        left_blocks: Those that still have no copy elsewhere, and ``left_bytes``.
        left_bytes: Their slots.
        reason: Why some stayed behind: no_room, timeout or failed; empty when none did.
    """

    node_id: str
    state: str
    blocks: int
    size_bytes: int
    left_blocks: int
    left_bytes: int
    reason: str
