"""What a transport promises: moving batches of blocks between the caller's buffers and one node's slots."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvpool.core.checksum import block_seed_array, block_seeds
from kvpool.core.keys import select_hashes
from kvpool.ops.credentials import TlsPeer
from kvpool.transport.blocks import Blocks
from kvpool.transport.deadline import Deadline


class OnDiskError(Exception):
    """The segment is not host memory, so it can be neither mapped nor read one-sided: the node reads it for us."""


class ReadStatus(IntEnum):
    """What became of one block of a read."""

    OK = 0
    """The destination holds the right bytes: their checksum was verified there."""
    GONE = 1
    """The node no longer has the slot."""
    BAD = 2
    """The bytes that arrived are not the block's; the destination holds garbage."""
    FAILED = 3
    """The node could not be reached; the destination may hold garbage."""
    LATE = 4
    """The deadline came first; the destination may hold garbage."""
    REFUSED = 5
    """The read grant opened nothing any more: another locate brings a new one."""


def verdicts(found: Sequence[int], expected: Sequence[int]) -> bytearray:
    """A `ReadStatus` for each block, by the checksum over its destination and the one that the directory gave."""
    if found == expected:
        return bytearray(len(found))
    return bytearray(ReadStatus.OK if f == e else ReadStatus.BAD for f, e in zip(found, expected, strict=True))


Reading = Callable[[], bytearray]
"""Waits for a read that was begun; a `ReadStatus` for each block. It may raise UnavailableError."""


class WriteStatus(IntEnum):
    """What became of one block of a write."""

    COMMITTED = 0
    STALE = 1
    """The reservation lost the block, or its slot, before it was committed."""
    BAD = 2
    """The bytes that arrived are not those the writer sent."""
    NO_SLOT = 3
    """The node has no free extent of that length."""
    FAILED = 4
    """The node could not be reached, or not in time; whether it committed the block is not known."""


@dataclass(frozen=True, slots=True)
class Target:
    """The process that a transport is to reach, and how.

    Attributes:
        uri: One of the node's endpoints.
        principal: Who is calling.
        incarnation: The process that must answer there.
        streams: Threads, or connections, that one large transfer may use.
        timeout_s: Time to connect.
        peer: Who must answer over TLS; None: plaintext.
    """

    uri: str
    principal: str
    incarnation: int
    streams: int
    timeout_s: float
    peer: TlsPeer | None = None

    @property
    def place(self) -> str:
        """The URI without its scheme."""
        return self.uri.partition("://")[2]


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Blocks of one segment to read.

    Attributes:
        segment_id: Where they lie.
        namespace_seed: `Namespace.seed`.
        block_bytes: Length of each.
        shard: Which shard of them.
        hashes: Their hashes, packed.
        slots: uint32 each.
        generations: uint64 each.
        checksums: uint64 each, as the directory gave them.
        destinations: The caller's writable memory; the transport writes only into it.
        grant: The read grant, for the node; empty where it asks for none.
    """

    segment_id: bytes
    namespace_seed: int
    block_bytes: int
    shard: int
    hashes: bytes
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    destinations: Blocks
    grant: bytes = b""

    def seeds(self) -> list[int]:
        """Checksum seed of each block."""
        return block_seeds(self.namespace_seed, self.hashes, self.shard, self.generations, self.block_bytes)

    def seed_array(self) -> NDArray[np.uint64]:
        """`seeds`, faster for many blocks."""
        return block_seed_array(self.namespace_seed, self.hashes, self.shard, self.generations, self.block_bytes)

    def select(self, blocks: Sequence[int]) -> "ReadBatch":
        """The same for some of the blocks (indexes, ascending)."""
        some = np.array(blocks)
        return replace(
            self,
            hashes=select_hashes(self.hashes, blocks),
            slots=self.slots[some],
            generations=self.generations[some],
            checksums=self.checksums[some],
            destinations=self.destinations.select(blocks),
        )


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """The blocks of one grant to write.

    Attributes:
        grant: The sealed grant, for the node.
        reservation: Its write token.
        segment_id: Where to.
        namespace_seed: `Namespace.seed`.
        block_bytes: Length of each.
        shard: Which shard of them.
        hashes: Their hashes, packed, in the grant's order.
        sources: The caller's memory, only read; the caller must not change it before the call returns.
    """

    grant: bytes
    reservation: int
    segment_id: bytes
    namespace_seed: int
    block_bytes: int
    shard: int
    hashes: bytes
    sources: Blocks

    def seeds(self, generations: NDArray[np.uint64], blocks: Sequence[int]) -> list[int]:
        """Checksum seeds of ``blocks`` (indexes, ascending), once the node has given their generations."""
        hashes = select_hashes(self.hashes, blocks)
        return block_seeds(self.namespace_seed, hashes, self.shard, generations, self.block_bytes)


class Transport(ABC):
    """One client's way to one node. Thread-safe; the client owns it and closes it. Made of a `Target`.

    A transport never reports success before the checksum over the *destination* was compared, and never raises for
    what the data path turns into a miss: a slot that is gone, bad bytes, a dead or slow peer are statuses. After
    `close` calls raise ClosedError.
    """

    name: str
    """Its scheme, as counters and logs show it."""

    reaches_far: frozenset[str] = frozenset()
    """Media that it moves `FarBlocks` from and to; for others it gets host memory; the client loads on from that."""

    carrier: str = ""
    """What moves the bytes below it, where the scheme does not say so: transport and device, once they are known."""

    fell_back: bool = False
    """Whether the carrier is a slower one than the transport is meant for, and nobody asked for that."""

    @classmethod
    def prepare(cls, pool_uri: str) -> Callable[[], None]:
        """Get ready what a process's transports of this kind share, for the pool at ``pool_uri``; what lets go of it.

        Raises:
            SettingsError: What this transport needs is not installed.
            UnavailableError: It cannot be had now.
        """
        del pool_uri
        return _nothing

    @abstractmethod
    def read(self, batch: ReadBatch, deadline: Deadline) -> bytearray:
        """Read the batch's blocks; one `ReadStatus` each, by ``deadline``."""

    def begin_read(self, batch: ReadBatch, deadline: Deadline) -> Reading:
        """`read`, but copies that a device makes by itself are only begun. What is returned must be called."""
        statuses = self.read(batch, deadline)
        return lambda: statuses

    @abstractmethod
    def write(self, batches: Iterable[WriteBatch], deadline: Deadline) -> list[bytearray]:
        """Prepare, write and commit the blocks of some grants; one `WriteStatus` each, by ``deadline``.

        Batches are drawn as they are sent; KvpoolError that drawing one raises ends the write with those before.
        """

    def reach(self, segment_id: bytes, deadline: Deadline) -> None:  # noqa: B027 - most have nothing to do
        """Do what a first read of the segment begins with, so that ``carrier`` is known; raises KvpoolError."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and mappings; calls in flight end with FAILED or ClosedError."""


def _nothing() -> None:
    """What lets go of nothing."""
