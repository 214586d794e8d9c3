"""Blocks that a connection brings: the slots it names, and what is answered when their bytes have arrived."""

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import ProtocolError
from kvpool.core.limits import SLOTS_PER_CALL_MAX
from kvpool.node.store import NodeStore
from kvpool.transport.base import WriteStatus
from kvpool.transport.ucx.messages import PullRequest
from kvpool.transport.wire.messages import Statuses, WriteRequest, unpack
from kvpool.transport.wire.server import Reply

Written = tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]
"""Slots, their generations, and the checksums of what is to be in them."""


def named_slots(slots: bytes, generations: bytes) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """The slots of one call and their generations; raises ProtocolError for none, and for too many."""
    count = len(slots) // 4
    if not 1 <= count <= SLOTS_PER_CALL_MAX:
        raise ProtocolError(f"{count} slots in one call; name from 1 to {SLOTS_PER_CALL_MAX}")
    return unpack("slots", slots, "<u4", count), unpack("generations", generations, "<u8", count)


def written_slots(request: WriteRequest | PullRequest) -> Written:
    """What a writer says of its blocks; raises as `named_slots`."""
    slots, generations = named_slots(request.slots, request.generations)
    return slots, generations, unpack("checksums", request.checksums, "<u8", len(slots))


def commit_arrived(
    store: NodeStore,
    request: WriteRequest | PullRequest,
    owner: int,
    written: Written,
    arrived: NDArray[np.bool_],
) -> Reply:
    """Commit slots, and answer for each; those where other bytes arrived than the writer has are BAD."""
    committed = store.commit_slots(request.segment_id, request.reservation, owner, *written)
    statuses = np.frombuffer(committed, np.uint8).copy()
    statuses[~arrived] = WriteStatus.BAD
    return Reply(Statuses(statuses.tobytes()))
