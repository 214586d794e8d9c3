"""Asking the service where blocks lie, and what its answers mean: nothing of one that cannot be is used."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import MissReason
from kvpool.core.errors import DeadlineError, KvpoolError, OverloadedError, ProtocolError, UsageError
from kvpool.core.limits import HASH_BYTES
from kvpool.ops.tracing import OpenSpan
from kvpool.transport.blocks import Blocks, FarBlocks
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import LocateReply, LocateRequest, unpack

if TYPE_CHECKING:
    from kvpool.client.keyspace import Keyspace

EXPECTED_BLOCKS_MIN = 64
"""Blocks of far memory that are worth getting ready for while they are located."""

_COLUMNS = ("block", "segment", "slot", "generation", "checksum")


@dataclass(frozen=True, slots=True)
class Copies:
    """Where the located blocks lie: one element a copy."""

    block: NDArray[Any]
    segment: NDArray[Any]
    slot: NDArray[Any]
    generation: NDArray[Any]
    checksum: NDArray[Any]
    reason: MissReason | None
    """Why the next block was not located."""

    each_once: bool
    """Whether each block has one copy; they are in ascending order then."""

    def only(self, wanted: NDArray[np.bool_]) -> "Copies":
        """Some of them."""
        return replace(self, **{name: getattr(self, name)[wanted] for name in _COLUMNS})


_NONE = np.empty(0, np.uint32)
NO_COPIES = Copies(_NONE, _NONE, _NONE, _NONE, _NONE, None, each_once=True)


def miss_reason(error: KvpoolError) -> MissReason:
    """What a failure on the data path means to the caller."""
    if isinstance(error, OverloadedError):
        return MissReason.OVERLOADED
    return MissReason.OVER_DEADLINE if isinstance(error, DeadlineError) else MissReason.NODE_DOWN


def reason_of(said: str) -> MissReason | None:
    """The reason that the service gave, if it gave one; raises ProtocolError for what is none."""
    try:
        return MissReason(said) if said else None
    except ValueError as error:
        raise ProtocolError(f"{said[:40]!r} is no reason of a miss: the service speaks another version") from error


def locate(
    keyspace: "Keyspace", packed: bytes, first: int, step: range, shard: int, deadline: Deadline
) -> Copies | MissReason:
    """Where the blocks of ``step`` lie, or why nobody can say; raises UsageError."""
    request = _request(keyspace, packed, first, step, shard)
    try:
        with keyspace.tracer.span("kvpool.locate", blocks=len(step)):
            reply = keyspace._call(request, LocateReply, deadline)
    except UsageError:
        raise
    except KvpoolError as error:
        return miss_reason(error)
    return _learned(keyspace, reply, len(step))


def locate_all(
    keyspace: "Keyspace",
    packed: bytes,
    first: int,
    steps: Sequence[range],
    shard: int,
    destinations: Blocks,
    deadline: Deadline,
) -> Iterator[Copies | MissReason]:
    """`locate` for each step.

    The service works on one step while the caller uses the answer for the one before. Once that fails, each step is
    asked for by itself.
    """
    expected = isinstance(destinations, FarBlocks) and len(destinations) >= EXPECTED_BLOCKS_MIN
    meanwhile = destinations.expect_load if isinstance(destinations, FarBlocks) and expected else _nothing
    answered = 0
    reason: MissReason | None = None
    if len(steps) > 1 or expected:
        requests = _requests(keyspace, packed, first, steps, shard)
        try:
            for reply in keyspace._locate_calls(requests, deadline, meanwhile):
                answered += 1
                yield _learned(keyspace, reply, len(steps[answered - 1]))
        except (OverloadedError, DeadlineError) as error:
            reason = miss_reason(error)  # asking again cannot help
        except KvpoolError:
            pass
    if reason is not None:
        answered += 1
        yield reason
    for step in steps[answered:]:
        yield locate(keyspace, packed, first, step, shard, deadline)


def _requests(
    keyspace: "Keyspace", packed: bytes, first: int, steps: Sequence[range], shard: int
) -> Iterator[tuple[LocateRequest, OpenSpan]]:
    """Made as they are drawn: by then the client may know more of nodes and grants."""
    for step in steps:
        span = keyspace.tracer.begin("kvpool.locate", blocks=len(step))
        yield _request(keyspace, packed, first, step, shard), span


def _request(keyspace: "Keyspace", packed: bytes, first: int, step: range, shard: int) -> LocateRequest:
    """What asks where the blocks of ``step`` lie."""
    upto, version = packed[: (first + step.stop) * HASH_BYTES], keyspace._client._meta.topology.version
    return LocateRequest(keyspace.namespace.id, upto, first + step.start, shard, version, keyspace._grants.version)


def _learned(keyspace: "Keyspace", reply: LocateReply, wanted: int) -> Copies | MissReason:
    """What an answer for ``wanted`` blocks says; the nodes and grants that came with it are kept."""
    try:
        copies = _copies(reply, wanted)
    except KvpoolError as error:
        return miss_reason(error)
    keyspace._client._meta.learn(reply.topology)
    keyspace._grants.learn(reply.grants)
    return copies


def _copies(reply: LocateReply, wanted: int) -> Copies:
    """What the service says of ``wanted`` blocks; raises ProtocolError for what cannot be."""
    count = len(reply.slots) // 4
    blocks = unpack("blocks", reply.blocks, "<u4", count)
    if count and int(blocks.max()) >= wanted:
        raise ProtocolError(f"block {blocks.max()} was located, of {wanted}")
    each_once = count == reply.count
    if each_once and not (blocks[1:] > blocks[:-1]).all():
        raise ProtocolError("blocks were located twice, or not in their order")
    return Copies(
        blocks,
        unpack("segments", reply.segments, "<u2", count),
        unpack("slots", reply.slots, "<u4", count),
        unpack("generations", reply.generations, "<u8", count),
        unpack("checksums", reply.checksums, "<u8", count),
        reason_of(reply.reason),
        each_once=each_once,
    )


def _nothing() -> None:
    """What there is to get ready for a load to host memory."""
