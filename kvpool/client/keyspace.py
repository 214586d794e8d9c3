"""One namespace of a pool: match, load, store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from kvpool.client.buffers import Buffer, pieces_of
from kvpool.client.loading import load_blocks
from kvpool.client.results import LoadResult, Match, Reservation, StoreResult, WriteResult
from kvpool.client.storing import store_result, write_shard
from kvpool.core.directory import MissReason
from kvpool.core.errors import (
    InvalidHashError,
    KvpoolError,
    NamespaceMismatchError,
    UnavailableError,
    UnknownNamespaceError,
    UsageError,
)
from kvpool.core.keys import NO_PARENT, HashesLike, pack_hashes
from kvpool.core.limits import HASH_BYTES, LEASE_S_MAX, MATCH_BLOCKS_MAX, RESERVE_BLOCKS_MAX
from kvpool.core.namespace import Namespace
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import (
    NONE_INDEX,
    AbortRequest,
    Done,
    MatchReply,
    MatchRequest,
    Message,
    ReserveReply,
    ReserveRequest,
)

if TYPE_CHECKING:
    from kvpool.client.client import Client

Reply = TypeVar("Reply", bound=Message)


class Keyspace:
    """The blocks of one namespace. Thread-safe; made by `Client.namespace`.

    ``hashes`` is always a chain from its root, packed or as 32-byte strings; ``first`` says which block the first
    buffer is for. Buffers are the caller's: a load writes only into them, a store only reads them, and neither keeps
    them after it returns.
    """

    def __init__(self, client: "Client", namespace: Namespace) -> None:
        self.namespace = namespace
        self.client = client

    def match(
        self, hashes: HashesLike, *, first: int = 0, lease_s: float = 0.0, timeout_s: float | None = None
    ) -> Match:
        """How many leading blocks of the chain the pool holds.

        Args:
            hashes: The chain.
            first: The first block that will be loaded, e.g. after those cached locally.
            lease_s: Ask that they stay for so long, e.g. until they are loaded; 0 asks for nothing.
            timeout_s: Deadline; by default the client's.

        Returns:
            A match of 0 blocks with reason ``node_down`` or ``over_deadline`` when the pool cannot be asked in time.

        Raises:
            UsageError: Hashes, lease or time-out that cannot be.
        """
        packed = pack_hashes(hashes, MATCH_BLOCKS_MAX)
        lease_ms = _lease_ms(lease_s)
        deadline = self.client.deadline(timeout_s)
        try:
            reply = self.call(MatchRequest(self.namespace.id, packed, first, lease_ms), MatchReply, deadline)
        except UsageError:
            raise
        except KvpoolError as error:
            reason = MissReason.NODE_DOWN if isinstance(error, UnavailableError) else MissReason.OVER_DEADLINE
            return Match(0, reason)
        return Match(reply.blocks, MissReason(reply.reason) if reply.reason else None)

    def load(
        self,
        hashes: HashesLike,
        buffers: Sequence[Buffer],
        *,
        first: int = 0,
        shard: int = 0,
        lease_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> LoadResult:
        """Load blocks ``first``… into ``buffers``, verifying every byte in its destination.

        Args:
            hashes: The chain, at least up to the last block wanted.
            buffers: A writable buffer, or a list of pieces, for each block.
            first: Index of the first of them.
            shard: Which rank's bytes.
            lease_s: Ask that the blocks stay for so long. Without, they are the pool's most recently used ones, which
                is enough unless it turns over faster than one load takes.
            timeout_s: Deadline; by default the client's.

        Raises:
            UsageError: Hashes, buffers, shard or time-out that cannot be. Nothing was written.
        """
        packed = self._slice(hashes, first, len(buffers), MATCH_BLOCKS_MAX)
        self._check_shard(shard)
        pieces = pieces_of(buffers, self.namespace.block_bytes, writable=True)
        return load_blocks(self, packed, pieces, first, shard, _lease_ms(lease_s), self.client.deadline(timeout_s))

    def store(
        self,
        hashes: HashesLike,
        buffers: Sequence[Buffer],
        *,
        first: int = 0,
        timeout_s: float | None = None,
    ) -> StoreResult:
        """Store blocks ``first``… of the chain; what the pool holds already is not sent.

        Args:
            hashes: The chain, at least up to the last block given. Its blocks before ``first`` must be stored.
            buffers: A buffer, or a list of pieces, for each block.
            first: Index of the first of them.
            timeout_s: Deadline; by default the client's.

        Raises:
            UsageError: Hashes, buffers or time-out that cannot be, or a namespace of several shards: `reserve` there,
                and let each rank `write`. Nothing was stored.
        """
        if self.namespace.shards != 1:
            raise NamespaceMismatchError(
                f"the namespace has {self.namespace.shards} shards; reserve once, and let each rank write its own"
            )
        packed = self._slice(hashes, first, len(buffers), RESERVE_BLOCKS_MAX)
        pieces = pieces_of(buffers, self.namespace.block_bytes, writable=False)
        deadline = self.client.deadline(timeout_s)
        try:
            reservation = self._reserve(packed, first, NO_PARENT, deadline)
        except UsageError:
            raise
        except KvpoolError:
            self.client.counters.refused(len(buffers))
            return StoreResult(stored=0, refused=len(buffers))
        written = write_shard(self, reservation, pieces, 0, deadline)
        if written.failed:
            self._abort(reservation, written.failed)
        return store_result(self, reservation, written)

    def reserve(
        self,
        hashes: HashesLike,
        *,
        first: int = 0,
        parent: bytes = NO_PARENT,
        timeout_s: float | None = None,
    ) -> Reservation:
        """Reserve places for blocks ``first``…, for all shards; each rank then calls `write`, or somebody `abort`.

        Args:
            hashes: The chain from its root, or from below ``parent``.
            first: Index of the first block to write.
            parent: Hash above ``hashes``, when they do not begin at the root.
            timeout_s: Deadline; by default the client's.

        Raises:
            UsageError: Hashes or time-out that cannot be.
            UnavailableError: The pool cannot be asked in time.
        """
        packed = pack_hashes(hashes, MATCH_BLOCKS_MAX)
        return self._reserve(packed, first, parent, self.client.deadline(timeout_s))

    def write(
        self,
        reservation: Reservation,
        buffers: Sequence[Buffer],
        *,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> WriteResult:
        """Write one rank's bytes of a reservation; ``buffers`` has an entry for each block of its slice.

        A block that fails on one rank never turns visible: `abort` it for all, so that others may write it.

        Raises:
            UsageError: Buffers, shard or time-out that cannot be.
        """
        self._check_shard(shard)
        blocks = len(reservation.hashes) // HASH_BYTES
        if len(buffers) != blocks:
            raise UsageError(f"{len(buffers)} buffers for a reservation of {blocks} blocks; give one each")
        pieces = pieces_of(buffers, self.namespace.block_bytes, writable=False)
        return write_shard(self, reservation, pieces, shard, self.client.deadline(timeout_s))

    def abort(
        self, reservation: Reservation, blocks: Sequence[int] | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Give blocks of a reservation back (indexes into its slice; by default all). Never raises UnavailableError."""
        self._abort(reservation, blocks, timeout_s)

    def open(self, deadline: Deadline) -> None:
        """Make the namespace known to the service; done for the caller when the service has restarted."""
        self.client.meta.open_namespace(self.namespace.document, deadline)

    def call(self, request: Message, reply_type: type[Reply], deadline: Deadline, *, again: bool = True) -> Reply:
        """A hot call about this namespace, which is opened again if the service has forgotten it."""
        try:
            return self.client.meta.call(request, reply_type, deadline, again=again)
        except UnknownNamespaceError:
            self.open(deadline)
            return self.client.meta.call(request, reply_type, deadline, again=again)

    def _reserve(self, packed: bytes, first: int, parent: bytes, deadline: Deadline) -> Reservation:
        meta = self.client.meta
        # Asking again could reserve twice; the first answer's places would only come back at their deadline.
        request = ReserveRequest(self.namespace.id, packed, first, parent, 0, meta.topology.version)
        reply = self.call(request, ReserveReply, deadline, again=False)
        meta.learn(reply.topology)
        missing_from = None if reply.missing_from == NONE_INDEX else reply.missing_from
        return Reservation(
            reply.reservation, first, packed[first * HASH_BYTES :], reply.wants, missing_from, reply.grants
        )

    def _abort(self, reservation: Reservation, blocks: Sequence[int] | None, timeout_s: float | None = None) -> None:
        if not reservation.number:
            return
        hashes = reservation.hashes
        chosen = b"" if blocks is None else b"".join(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in blocks)
        try:
            deadline = self.client.deadline(timeout_s)
            self.client.meta.call(AbortRequest(reservation.number, chosen), Done, deadline, again=False)
        except UnavailableError:
            pass  # the reservation runs out by itself

    def _slice(self, hashes: HashesLike, first: int, buffers: int, buffers_max: int) -> bytes:
        packed = pack_hashes(hashes, MATCH_BLOCKS_MAX)
        blocks = len(packed) // HASH_BYTES
        if not 1 <= buffers <= buffers_max:
            raise UsageError(f"{buffers} buffers in one call; give from 1 to {buffers_max}")
        if first < 0 or first + buffers > blocks:
            raise InvalidHashError(f"first={first} and {buffers} buffers reach beyond the {blocks} hashes given")
        return packed[: (first + buffers) * HASH_BYTES]

    def _check_shard(self, shard: int) -> None:
        if not 0 <= shard < self.namespace.shards:
            raise NamespaceMismatchError(f"shard {shard} is not one of the namespace's {self.namespace.shards}")


def _lease_ms(lease_s: float) -> int:
    if not 0 <= lease_s <= LEASE_S_MAX:
        raise UsageError(f"lease_s is {lease_s}; it must be from 0 to {LEASE_S_MAX:g}")
    return int(lease_s * 1000)
