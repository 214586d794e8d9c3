"""One namespace of a pool: match, load, store."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from kvpool.client.buffers import Buffers, blocks_of
from kvpool.client.granted import GrantBook
from kvpool.client.loading import load_blocks
from kvpool.client.locating import miss_reason, reason_of
from kvpool.client.results import LoadResult, Match, Reservation, StoreResult, WriteResult
from kvpool.client.storing import abort_blocks, reserve_blocks, store_blocks, write_shard
from kvpool.core.errors import (
    CapacityError,
    InvalidHashError,
    KvpoolError,
    NamespaceMismatchError,
    ProtocolError,
    UnavailableError,
    UnknownNamespaceError,
    UsageError,
)
from kvpool.core.keys import NO_PARENT, HashesLike, pack_hashes
from kvpool.core.limits import HASH_BYTES, LEASE_S_MAX, MATCH_BLOCKS_MAX
from kvpool.core.namespace import Namespace
from kvpool.ops.failpoints import failpoint
from kvpool.ops.tracing import OpenSpan, Tracer
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import (
    Done,
    LocateReply,
    LocateRequest,
    MatchReply,
    MatchRequest,
    Message,
    ReleaseRequest,
    ReserveRequest,
)

if TYPE_CHECKING:
    from kvpool.client.client import Client

Reply = TypeVar("Reply", bound=Message)

_STEPS: dict[type[Message], str] = {MatchRequest: "match", LocateRequest: "locate", ReserveRequest: "reserve"}


class Keyspace:
    """The blocks of one namespace. Thread-safe; made by `Client.namespace`.

    ``hashes`` is always a chain from its root, packed or as 32-byte strings; ``first`` says which block the first
    buffer is for. Buffers are the caller's: a load writes only into them, a store only reads them, and neither keeps
    them after it returns.
    """

    def __init__(self, client: "Client", namespace: Namespace) -> None:
        self.namespace = namespace
        self._client = client
        self._grants = GrantBook()
        self._took = {kind: client._counters.times[step].observe for kind, step in _STEPS.items()}

    @property
    def tracer(self) -> Tracer:
        """What records the client's steps, for steps of the caller's own around them."""
        return self._client._tracer

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
        _check_first(first, packed)
        lease_ms = _lease_ms(lease_s)
        deadline = self._client._deadline(timeout_s)
        with self.tracer.span("kvpool.match", blocks=len(packed) // HASH_BYTES) as span:
            matched = self._match(MatchRequest(self.namespace.id, packed, first, lease_ms), deadline)
            span.set(matched_blocks=matched.blocks, miss_reason=matched.reason or "")
        return matched

    def release(self, matched: Match, *, timeout_s: float | None = None) -> None:
        """End the lease of a match early, once its blocks are loaded; without it the lease runs out by itself."""
        deadline = self._client._deadline(timeout_s)
        if matched.lease:
            with suppress(UnavailableError, CapacityError):
                self._client._meta.call(ReleaseRequest(matched.lease), Done, deadline, again=False)

    def load(
        self,
        hashes: HashesLike,
        buffers: Buffers,
        *,
        first: int = 0,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> LoadResult:
        """Load blocks ``first``… into ``buffers``, verifying every byte in its destination.

        They need no lease for it: looking them up makes them the pool's most recently used ones.

        Args:
            hashes: The chain, at least up to the last block wanted.
            buffers: A list with a writable buffer, or a list of pieces, for each block; or one buffer with all blocks
                side by side, e.g. an array of shape (blocks, block_bytes), which is fastest.
            first: Index of the first of them.
            shard: Which rank's bytes.
            timeout_s: Deadline; by default the client's.

        Raises:
            UsageError: Hashes, buffers, shard or time-out that cannot be. Nothing was written.
        """
        self._check_shard(shard)
        destinations = blocks_of(buffers, self.namespace.block_bytes, writable=True)
        packed = self._slice(hashes, first, len(destinations))
        deadline = self._client._deadline(timeout_s)
        with self.tracer.span("kvpool.load", blocks=len(destinations), shard=shard) as span:
            loaded = load_blocks(self, packed, destinations, first, shard, deadline)
            reason = next(filter(None, loaded.reasons), "")
            span.set(loaded_blocks=loaded.loaded, loaded_bytes=loaded.size_bytes, miss_reason=reason)
        return loaded

    def store(
        self,
        hashes: HashesLike,
        buffers: Buffers,
        *,
        first: int = 0,
        timeout_s: float | None = None,
    ) -> StoreResult:
        """Store blocks ``first``… of the chain; what the pool holds already is not sent.

        Args:
            hashes: The chain, at least up to the last block given. Its blocks before ``first`` must be stored.
            buffers: As for `load`, but only read.
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
        sources = blocks_of(buffers, self.namespace.block_bytes, writable=False)
        packed = self._slice(hashes, first, len(sources))
        deadline = self._client._deadline(timeout_s)
        with self.tracer.span("kvpool.store", blocks=len(sources)) as span:
            stored = store_blocks(self, packed, sources, first, deadline)
            span.set(stored_blocks=stored.stored, existing_blocks=stored.existing, refused_blocks=stored.refused)
        return stored

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
        _check_first(first, packed)
        if not isinstance(parent, bytes) or len(parent) not in (0, HASH_BYTES):
            raise InvalidHashError(f"parent is {parent!r}; give a hash of {HASH_BYTES} bytes, or none")
        return reserve_blocks(self, packed, first, parent, self._client._deadline(timeout_s))

    def write(
        self,
        reservation: Reservation,
        buffers: Buffers,
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
        if reservation.namespace != self.namespace.id:
            raise NamespaceMismatchError("the reservation is for another namespace; write it there")
        blocks = len(reservation.hashes) // HASH_BYTES
        sources = blocks_of(buffers, self.namespace.block_bytes, writable=False)
        if len(sources) != blocks:
            raise UsageError(f"{len(sources)} buffers for a reservation of {blocks} blocks; give one each")
        return write_shard(self, reservation, sources, shard, self._client._deadline(timeout_s))

    def abort(
        self,
        reservation: Reservation,
        blocks: Sequence[int] | None = None,
        *,
        crowded: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Give blocks of a reservation back (indexes into its slice; by default all). Never raises UnavailableError.

        ``crowded``, as `write` answered it, makes room on the node for another try.
        """
        abort_blocks(self, reservation, blocks, self._client._deadline(timeout_s), crowded=crowded)

    def _open(self, deadline: Deadline) -> None:
        """Make the namespace known to the service; done for the caller when the service has restarted."""
        self._client._meta.open_namespace(self.namespace.document, deadline)

    def _match(self, request: MatchRequest, deadline: Deadline) -> Match:
        try:
            reply = self._call(request, MatchReply, deadline)
            reason, asked = reason_of(reply.reason), len(request.hashes) // HASH_BYTES
            if not 0 <= reply.blocks <= asked:
                raise ProtocolError(f"{reply.blocks} blocks matched of a chain of {asked}")
        except UsageError:
            raise
        except KvpoolError as error:
            self._client._counters.missed([miss_reason(error)])
            return Match(0, miss_reason(error), asked=False)
        failpoint("client.match.after_answer")
        return Match(reply.blocks, reason, reply.lease)

    def _call(self, request: Message, reply_type: type[Reply], deadline: Deadline, *, again: bool = True) -> Reply:
        """A hot call about this namespace, which is opened again if the service has forgotten it."""
        began_s = perf_counter()
        try:
            return self._client._meta.call(request, reply_type, deadline, again=again)
        except UnknownNamespaceError:
            self._open(deadline)
            return self._client._meta.call(request, reply_type, deadline, again=again)
        finally:
            self._took[type(request)](perf_counter() - began_s)

    def _locate_calls(
        self,
        requests: Iterable[tuple[LocateRequest, OpenSpan]],
        deadline: Deadline,
        meanwhile: Callable[[], None],
    ) -> Iterator[LocateReply]:
        """See `MetaClient.calls`; the time that is counted is the time waited for each."""
        answers, began_s = self._client._meta.calls(requests, LocateReply, deadline, meanwhile), perf_counter()
        for answer in answers:
            self._took[LocateRequest](perf_counter() - began_s)
            yield answer
            began_s = perf_counter()

    def _slice(self, hashes: HashesLike, first: int, buffers: int) -> bytes:
        packed = pack_hashes(hashes, MATCH_BLOCKS_MAX)
        blocks = len(packed) // HASH_BYTES
        if not buffers:
            raise UsageError("no buffers given; a call moves at least one block")
        _check_first(first, packed)
        if first + buffers > blocks:
            raise InvalidHashError(f"first={first} and {buffers} buffers reach beyond the {blocks} hashes given")
        return packed[: (first + buffers) * HASH_BYTES]

    def _check_shard(self, shard: int) -> None:
        if not isinstance(shard, int) or not 0 <= shard < self.namespace.shards:
            raise NamespaceMismatchError(f"shard {shard!r} is not one of the namespace's {self.namespace.shards}")


def _check_first(first: int, packed: bytes) -> None:
    blocks = len(packed) // HASH_BYTES
    if not isinstance(first, int) or not 0 <= first < blocks:
        raise InvalidHashError(f"first is {first!r}; it must be an index into the {blocks} hashes")


def _lease_ms(lease_s: float) -> int:
    if not isinstance(lease_s, int | float) or not 0 <= lease_s <= LEASE_S_MAX:
        raise UsageError(f"lease_s is {lease_s!r}; it must be from 0 to {LEASE_S_MAX:g}")
    return int(lease_s * 1000)
