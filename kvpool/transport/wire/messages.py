"""The messages of the framed protocol: closed, typed msgpack arrays without extensions.

Values that come one a block are packed arrays, little-endian, in chain order: hashes 32 bytes each, `slots` and
`blocks` uint32, `generations` and `checksums` uint64, `shards` and `segments` uint16, statuses uint8. `unpack` checks
their lengths.
"""

import re
from functools import cache
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvpool.core.errors import ProtocolError

PROTOCOL_VERSION = 3
NONE_INDEX = -2
"""`missing_from` when nothing is missing."""
ALL_SHARDS = -1

KINDS: "dict[int, type[Message]]" = {}
"""Messages by number; those of one transport alone are in its own module, and known where it is used."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages; `kind` is their number in frame headers, odd for replies, `step` their name in traces."""

    kind: ClassVar[int] = 0
    step: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:  # noqa: ANN401 - options of msgspec's
        super().__init_subclass__(**options)
        cls.step = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Request")).lower()
        if cls.kind:
            KINDS[cls.kind] = cls


class Hello(Message, frozen=True):
    """First on every connection. ``principal`` is who the caller says it is; services that authenticate overrule it.

    ``token`` is what proves who the caller is, over TLS and without a certificate; else empty.
    """

    kind = 2
    version: int
    principal: str
    token: str = ""

    def __repr__(self) -> str:
        return f"Hello(version={self.version}, principal={self.principal!r})"


class Welcome(Message, frozen=True):
    """Answer to Hello: which process this is. ``incarnation`` is random, new at each start."""

    kind = 3
    version: int
    name: str
    incarnation: int


class ErrorReply(Message, frozen=True):
    """The call failed: ``error`` names a class of `kvpool.core.errors`."""

    kind = 1
    error: str
    message: str


class Done(Message, frozen=True):
    """Answer of calls that return a count or nothing."""

    kind = 5
    count: int


class Ping(Message, frozen=True):
    """Asks for Done(0)."""

    kind = 4


class MatchRequest(Message, frozen=True):
    """`Directory.match`."""

    kind = 10
    namespace: bytes
    hashes: bytes
    first: int
    lease_ms: int


class MatchReply(Message, frozen=True):
    """Matched blocks; ``reason`` (a MissReason, or empty) says why the next one is not."""

    kind = 11
    blocks: int
    reason: str
    lease: int


class ReleaseRequest(Message, frozen=True):
    """`Directory.release`. Answered by Done."""

    kind = 24
    lease: int


class SegmentInfo(Message, frozen=True):
    """A segment of a node; ``number`` is its short name in LocateReply and SegmentGrant."""

    number: int
    segment_id: bytes
    medium: str
    capacity_bytes: int


class NodeInfo(Message, frozen=True):
    """A node of the pool: state, and the URIs of its data plane, best first."""

    node_id: str
    incarnation: int
    state: str
    endpoints: list[str]
    segments: list[SegmentInfo]


class Topology(Message, frozen=True):
    """All nodes. Sent along when the caller's ``topology`` version is not the current one."""

    version: int
    nodes: list[NodeInfo]


class NodeGrant(Message, frozen=True):
    """The read grant for the node process ``incarnation``."""

    incarnation: int
    grant: bytes


class ReadGrants(Message, frozen=True):
    """A namespace's grants, of all nodes. Sent along when the caller's ``grants`` version is not the current one."""

    version: int
    nodes: list[NodeGrant]


class LocateRequest(Message, frozen=True):
    """`Directory.locate`; ``shard`` or ALL_SHARDS."""

    kind = 12
    namespace: bytes
    hashes: bytes
    first: int
    shard: int
    topology: int
    grants: int = 0


class LocateReply(Message, frozen=True):
    """`Location`: arrays with one element a copy; ``count`` is how many blocks were located."""

    kind = 13
    count: int
    reason: str
    blocks: bytes
    shards: bytes
    segments: bytes
    slots: bytes
    generations: bytes
    checksums: bytes
    topology: Topology | None
    grants: ReadGrants | None = None


class ReserveRequest(Message, frozen=True):
    """`Directory.reserve`."""

    kind = 14
    namespace: bytes
    hashes: bytes
    first: int
    parent: bytes
    ttl_ms: int
    topology: int


class SegmentGrant(Message, frozen=True):
    """What one rank stores on one segment: indexes into the slice (``blocks``), and the sealed grant."""

    segment: int
    shard: int
    blocks: bytes
    grant: bytes


class ReserveReply(Message, frozen=True):
    """`ReserveResult`; ``missing_from`` may be NONE_INDEX."""

    kind = 15
    reservation: int
    wants: bytes
    missing_from: int
    grants: list[SegmentGrant]
    topology: Topology | None


class AbortRequest(Message, frozen=True):
    """`Directory.abort`; no hashes: the whole reservation. Answered by Done."""

    kind = 16
    reservation: int
    hashes: bytes
    crowded: bool


class ReportBadRequest(Message, frozen=True):
    """`Directory.report_bad`. Answered by Done."""

    kind = 18
    namespace: bytes
    hash: bytes
    segment_id: bytes
    slot: int
    generation: int


class CommitRequest(Message, frozen=True):
    """`Directory.commit`, from the node of ``session``. Answered by Statuses of CommitStatus."""

    kind = 20
    session: int
    segment_id: bytes
    reservation: int
    hashes: bytes
    shards: bytes
    slots: bytes
    generations: bytes
    checksums: bytes


class GoneRequest(Message, frozen=True):
    """Slots a node no longer serves; ``bad``: since their bytes have changed. Answered by Done."""

    kind = 22
    session: int
    segment_id: bytes
    namespace: bytes
    hashes: bytes
    slots: bytes
    generations: bytes
    bad: bool = False


class Statuses(Message, frozen=True):
    """One uint8 status a block."""

    kind = 21
    statuses: bytes


class PrepareRequest(Message, frozen=True):
    """Open slots for the blocks of a sealed grant, freeing its victims first. They belong to this connection."""

    kind = 30
    grant: bytes


class PrepareReply(Message, frozen=True):
    """A slot and generation for each shard; NO_SLOT where there is no room."""

    kind = 31
    slots: bytes
    generations: bytes


class WriteRequest(Message, frozen=True):
    """Bytes for prepared slots, in the payload: equal shares of it, in order. Answered by Statuses of WriteStatus.

    The node checks every checksum over the slot before it commits it.
    """

    kind = 32
    segment_id: bytes
    reservation: int
    slots: bytes
    generations: bytes
    checksums: bytes


class CommitSlotsRequest(Message, frozen=True):
    """The writer has written these mapped slots itself: commit them. Answered by Statuses of WriteStatus."""

    kind = 34
    segment_id: bytes
    reservation: int
    slots: bytes
    generations: bytes
    checksums: bytes


class DiscardRequest(Message, frozen=True):
    """Give prepared slots back. Answered by Done."""

    kind = 36
    segment_id: bytes
    slots: bytes
    generations: bytes


class ReadRequest(Message, frozen=True):
    """Send the bytes of committed slots, ``block_bytes`` each, of the namespace that the read grant is for."""

    kind = 38
    segment_id: bytes
    slots: bytes
    generations: bytes
    block_bytes: int
    grant: bytes = b""


class ReadReply(Message, frozen=True):
    """``present``: uint8 a slot; the payload holds the present ones, in order."""

    kind = 39
    present: bytes


class AttachRequest(Message, frozen=True):
    """Ask for the segment's file descriptors (Unix sockets only), with a read or a write grant."""

    kind = 40
    segment_id: bytes
    grant: bytes = b""


NOT_MAPPED = 0
"""Stands for the size of a segment that nobody maps, since it is on disk: no descriptors follow."""

NOT_ALLOWED = -1
"""Stands for the size of a segment that this caller may not map: no descriptors follow."""


class AttachReply(Message, frozen=True):
    """Size of the payload file; its read-only and read-write descriptors follow as ancillary data of one byte."""

    kind = 41
    size_bytes: int


_ENCODER = msgspec.msgpack.Encoder()
_decoder = cache(msgspec.msgpack.Decoder)


def encode(message: Message) -> bytes:
    """The message's body."""
    return _ENCODER.encode(message)


def decode(kind: int, body: bytes | bytearray | memoryview) -> Message:
    """The message in ``body``.

    Raises:
        ProtocolError: An unknown kind, or a body that is not exactly that message.
    """
    cls = KINDS.get(kind)
    if cls is None:
        raise ProtocolError(f"message kind {kind} is not known: the peer speaks another version")
    try:
        message: Message = _decoder(cls).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{cls.__name__} cannot be read: {error}") from error
    return message


def pack(values: ArrayLike, dtype: str) -> bytes:
    """A packed array of ``values``."""
    return np.asarray(values, dtype).tobytes()


def unpack(field: str, data: bytes, dtype: str, count: int) -> NDArray[Any]:
    """The ``count`` elements in ``data``, read-only.

    Raises:
        ProtocolError: Another number of elements.
    """
    expected = np.dtype(dtype).itemsize * count
    if len(data) != expected:
        raise ProtocolError(f"{field} has {len(data)} bytes; {count} elements need {expected}")
    return np.frombuffer(data, dtype)
