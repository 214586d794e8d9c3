"""Event messages: what became loadable from the pool and what ceased to be, in the wire format of vLLM's KV events.

A message of the stream has three frames: topic, sequence number (8 bytes, big endian) and a msgpack `EventBatch`. An
event is a map with its ``type``; its hashes are the engines' own, 32 raw bytes each.

    BlockStored         block_hashes, each the parent of the next; parent_block_hash of the first, nil for a root;
                        token_ids: empty, they are the prompt; block_size: tokens of a block; lora_id, lora_name: nil
    BlockRemoved        block_hashes, in any order
    AllBlocksCleared    forget everything that was told before

Both kinds with hashes say ``medium``: STORAGE, ``locality``: REMOTE, and ``ownership``: ``kvpool:`` and the id of the
namespace in hex. Hashes of different namespaces have nothing to do with each other.

The replay socket is a ROUTER. It is asked, after an empty frame, one of two things:

    8 bytes             a sequence number, big endian: all messages from there on that are still kept are sent again,
                        each as an empty frame and the three of the stream; then one with sequence -1 and no more
    msgpack `SnapshotRequest`   answered by an empty frame and a msgpack `SnapshotPart`
"""

from typing import Final, TypeVar

import msgspec

from kvpool.core.errors import ProtocolError
from kvpool.core.limits import HASH_BYTES, NAMESPACE_ID_BYTES

TOPIC: Final = b"kvpool"
END: Final = b"\xff" * 8
"""The sequence number -1: a replay is over."""

MEDIUM: Final = "STORAGE"
LOCALITY: Final = "REMOTE"
OWNERSHIP: Final = "kvpool:"

SEQUENCE_BYTES: Final = 8
REQUEST_BYTES_MAX: Final = 64
MESSAGE_BYTES_MAX: Final = 1 << 20
"""More than any batch or part."""

PART_ROWS_MAX: Final = 1024
"""Rows of the directory that one part of a snapshot is made of: the time that it holds up everybody else."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Blocks of one chain can be loaded."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    block_size: int
    token_ids: list[int] = []
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    locality: str | None = LOCALITY
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Blocks cannot be loaded any more."""

    block_hashes: list[bytes]
    medium: str | None = MEDIUM
    locality: str | None = LOCALITY
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing that was told before counts any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One message. ``ts`` is the time of day in seconds when it was made, for people."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Asks for part of all that can be loaded.

    Attributes:
        first: Where the part begins: 0, or ``following`` of the part before.
        rows: How much to look through; 0 asks for the position alone.
    """

    first: int
    rows: int


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Part of all that can be loaded.

    Attributes:
        incarnation: Of the service: parts of different ones do not belong together.
        sequence: Of the last message of the stream that this part knows of. Whoever has all parts and applies every
            message after the first part's sequence has what can be loaded, from the last part's sequence on.
        events: `BlockStored` alone.
        following: Where the next part begins; nil after the last one.
    """

    incarnation: int
    sequence: int
    events: list[BlockStored]
    following: int | None


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(EventBatch)
_requests = msgspec.msgpack.Decoder(SnapshotRequest)
_parts = msgspec.msgpack.Decoder(SnapshotPart)

Decoded = TypeVar("Decoded")


def encode(message: EventBatch | SnapshotRequest | SnapshotPart) -> bytes:
    """The message's bytes."""
    return _encoder.encode(message)


def decode_batch(data: bytes) -> EventBatch:
    """A message of the stream; raises ProtocolError."""
    batch = _decoded(_batches, data, MESSAGE_BYTES_MAX)
    _check_events(batch.events)
    return batch


def decode_request(data: bytes) -> SnapshotRequest:
    """A request; raises ProtocolError."""
    request = _decoded(_requests, data, REQUEST_BYTES_MAX)
    if not 0 <= request.first < 1 << 31 or not 0 <= request.rows <= PART_ROWS_MAX:
        raise ProtocolError(f"{request.rows} rows from {request.first}; ask for 0 to {PART_ROWS_MAX} at a time")
    return request


def decode_part(data: bytes) -> SnapshotPart:
    """Part of a snapshot; raises ProtocolError."""
    part = _decoded(_parts, data, MESSAGE_BYTES_MAX)
    _check_events(part.events)
    return part


def pack_sequence(sequence: int) -> bytes:
    """A sequence number as a frame."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def unpack_sequence(frame: bytes) -> int:
    """The sequence number in a frame; raises ProtocolError."""
    if len(frame) != SEQUENCE_BYTES:
        raise ProtocolError(f"a sequence number of {len(frame)} bytes; it has {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


def ownership(namespace_id: bytes) -> str:
    """What events of a namespace say whose they are."""
    return OWNERSHIP + namespace_id.hex()


def namespace_of(event: BlockStored | BlockRemoved) -> bytes:
    """The id of the namespace that an event is about; raises ProtocolError when it is none of ours."""
    kind, _, digits = (event.ownership or "").partition(":")
    try:
        namespace_id = bytes.fromhex(digits)
    except ValueError:
        namespace_id = b""
    if f"{kind}:" != OWNERSHIP or len(namespace_id) != NAMESPACE_ID_BYTES:
        raise ProtocolError(f"an event of {event.ownership!r}; a pool's are of kvpool: and a namespace")
    return namespace_id


def _decoded(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes, most: int) -> Decoded:
    if len(data) > most:
        raise ProtocolError(f"an event message of {len(data)} bytes; the limit is {most}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"an event message that cannot be read: {error}") from error


def _check_events(events: list[Event] | list[BlockStored]) -> None:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            continue
        namespace_of(event)
        if any(len(block_hash) != HASH_BYTES for block_hash in event.block_hashes):
            raise ProtocolError(f"an event with a block hash that is not {HASH_BYTES} bytes long")
