"""What the directory answers: small frozen records, packed where there is one value a block."""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

from kvpool.core.directory.outbox import FreeSlot
from kvpool.core.directory.tombstones import MissReason


class Want(IntEnum):
    """What `reserve` says of one block."""

    WANTED = 0
    """Write it: it has a place and a grant."""
    EXISTS = 1
    """Stored already (first writer wins)."""
    IN_FLIGHT = 2
    """Another writer is at it."""
    NO_ROOM = 3
    """Everything in the pool is held, or the chain above it found no room."""


class CommitStatus(IntEnum):
    """What `commit` says of one block."""

    COMMITTED = 0
    STALE = 1
    """The reservation no longer owns the block: the node must free the slot."""


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks that are visible, and why the next one is not; the lease's number, 0 without one.

    ``asked`` is False where the pool could not be asked in time, and ``reason`` says why: a pool that answers gives the
    same reasons for blocks that it lost.
    """

    blocks: int
    reason: MissReason | None
    lease: int = 0
    asked: bool = True


@dataclass(frozen=True, slots=True)
class Location:
    """Where the blocks of a chain's slice lie: one element a copy, blocks in chain order.

    Attributes:
        blocks: Blocks located: the visible ones of the slice.
        block: Index of the copy's block within the slice (``array("I")``).
        shard: ``array("H")``.
        segment: Segment number (``array("H")``).
        slot: ``array("I")``.
        generation: ``array("Q")``.
        checksum: ``array("Q")``.
        reason: Why the next block is missing; None when the whole slice is there.
    """

    blocks: int
    block: "array[int]"
    shard: "array[int]"
    segment: "array[int]"
    slot: "array[int]"
    generation: "array[int]"
    checksum: "array[int]"
    reason: MissReason | None

    @classmethod
    def nothing(cls, reason: MissReason) -> Self:
        """No block was located."""
        return cls(0, array("I"), array("H"), array("H"), array("I"), array("Q"), array("Q"), reason)


@dataclass(slots=True)
class Share:
    """The part of a reservation that one rank writes to one segment, and what the node frees for it.

    Attributes:
        indexes: Indexes of the blocks in the reserved slice.
        victims: Orders that make the room.
    """

    indexes: list[int] = field(default_factory=list)
    victims: list[FreeSlot] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """Answer to `reserve`.

    Attributes:
        reservation: The write token, or 0 when nothing is wanted.
        wants: One `Want` a block of the slice.
        shares: By (segment number, shard).
        missing_from: Index in the chain of the first ancestor that is not there (-1: the given parent), or None.
    """

    reservation: int
    wants: bytes
    shares: dict[tuple[int, int], Share]
    missing_from: int | None


@dataclass(frozen=True, slots=True)
class LookupStats:
    """What look-ups asked for and found, since the service's start; ``misses`` are look-ups by why they ended early."""

    asked_tokens: int
    matched_tokens: int
    misses: dict[MissReason, int]


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """Counts and bytes, at one moment; capacity and use are those of memory unless they say disk."""

    namespaces: int
    blocks: int
    capacity_bytes: int
    used_bytes: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    reservations: int
    leases: int
    leased_bytes: int
    evicted_blocks: int
    evicted_bytes: int
    scattered_blocks: int
    expired_blocks: int
    lost_blocks: int
    bad_blocks: int
    refused_blocks: int
    orders_pending: int
    surplus_blocks: int
    surplus_bytes: int
    copies: int
    copied_blocks: int
    copied_bytes: int
    reclaimed_copies: int
    demoted_blocks: int
    promoted_blocks: int
    lookups: int
    blocks_asked: int
    blocks_matched: int
    matches_shortened: int
