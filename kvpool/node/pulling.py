"""The node's side of the `ucx` transport: it offers its segment to be read, and reads what writers have laid out.

No writer ever holds a slot: the node reads the bytes itself, compares them with the writer's checksums, and commits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory import FETCHED
from kvpool.core.errors import CapacityError, KvpoolError, ProtocolError
from kvpool.core.limits import PAGE_BYTES
from kvpool.node.arriving import commit_arrived, written_slots
from kvpool.node.guarding import Guard
from kvpool.node.records import Receiving
from kvpool.node.segment import Segment
from kvpool.node.store import NodeStore
from kvpool.transport.copying import checksum
from kvpool.transport.deadline import Deadline
from kvpool.transport.ucx.messages import AGENT_BYTES_MAX, OfferRequest, PullRequest, Region, RegisterRequest
from kvpool.transport.ucx.process import Peer, Transfer, UcxProcess
from kvpool.transport.wire.messages import NOT_MAPPED, Done, Message, unpack
from kvpool.transport.wire.payload import Payload
from kvpool.transport.wire.server import Reply

START_TIMEOUT_S = 15.0


def serve_segment(segment: Segment, devices: str) -> UcxProcess:
    """A running UCX process that serves the segment; the caller stops it.

    Others see a mapping that cannot be written: UCX itself would let whoever reads write too.

    Raises:
        SettingsError: NIXL is not installed.
        CapacityError: It does not start.
    """
    read_descriptor, write_descriptor = segment.descriptors()
    process = UcxProcess(write_descriptor, read_descriptor, segment.size_bytes, devices)
    try:
        process.start(Deadline(START_TIMEOUT_S))
    except KvpoolError as error:
        process.stop()
        raise CapacityError(f"the segment cannot be served over UCX: {error}; start the node without --ucx") from error
    return process


class Pulling:
    """One connection's share of it.

    Args:
        store: Where to.
        process: The node's UCX process.
        owner: The connection's number.
        guard: What is asked of readers; by default nothing.
    """

    def __init__(self, store: NodeStore, process: UcxProcess, owner: int, guard: Guard | None = None) -> None:
        self._store = store
        self._guard = guard or Guard(store, needs_grants=False)
        self._process = process
        self._owner = owner
        self._writer: tuple[Region, Peer] | None = None
        self.handlers: dict[type[Message], Callable[[Any, Payload], Reply]] = {
            OfferRequest: self._offer,
            RegisterRequest: self._register,
            PullRequest: self._pull,
        }

    def closed(self) -> None:
        """The writer is gone."""
        if self._writer is not None:
            self._process.forget(self._writer[1])
            self._writer = None

    def _offer(self, request: OfferRequest, payload: Payload) -> Reply:
        if self._store.of(request.segment_id).segment.medium in FETCHED:
            return Reply(Region(b"", 0, NOT_MAPPED))
        if not self._guard.may_map(request.grant):
            return Reply(Region(b"", 0, NOT_MAPPED))  # then it goes through frames
        return Reply(self._process.region(Deadline(payload.timeout_s)))

    def _register(self, request: RegisterRequest, payload: Payload) -> Reply:
        if len(request.agent) > AGENT_BYTES_MAX or request.size_bytes < PAGE_BYTES or request.address % PAGE_BYTES:
            raise ProtocolError(
                f"a region of {request.size_bytes} bytes at {request.address:#x}, described in {len(request.agent)} "
                f"bytes, cannot be; give whole pages, and at most {AGENT_BYTES_MAX} bytes about them"
            )
        region = Region(request.agent, request.address, request.size_bytes)
        if self._writer is None or self._writer[0] != region or self._writer[1].life != self._process.starts:
            self.closed()
            self._writer = (region, self._process.meet(region, Deadline(payload.timeout_s)))
        return Reply(Done(0))

    def _pull(self, request: PullRequest, payload: Payload) -> Reply:
        self._store.check_segment(request.segment_id)
        if self._writer is None:
            raise ProtocolError("a pull before the writer's region was registered")
        slots, generations, checksums = written = written_slots(request)
        pages = unpack("pages", request.pages, "<u4", len(slots))
        places = self._store.begin_receive(slots, generations, self._owner)
        arrived = self._fill(places, pages, checksums, payload)
        return commit_arrived(self._store, request, self._owner, written, arrived)

    def _fill(
        self,
        places: list[Receiving | None],
        pages: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
        payload: Payload,
    ) -> NDArray[np.bool_]:
        """Read the blocks into their slots; False where other bytes arrived than the writer has.

        Slots stay pinned for as long as anything can still be written to them. When the transfer fails they stay the
        connection's, which the writer closes then, if it has not gone itself: that tells the directory too.
        """
        mine = {i: place for i, place in enumerate(places) if place is not None}
        arrived = np.ones(len(places), np.bool_)
        sound = dict.fromkeys(mine, True)

        def end() -> None:
            self._store.end_receive([(place, sound[i]) for i, place in mine.items()])

        if not mine:
            return arrived
        transfer = None
        try:
            transfer = self._begin(list(mine.values()), pages[list(mine)], payload)
            transfer.wait(Deadline(payload.timeout_s), payload.is_wanted)
            for i, place in mine.items():
                sound[i] = checksum([place.view], place.seed) == int(checksums[i])
                arrived[i] = sound[i]
        finally:
            if transfer is None:
                end()
            else:
                transfer.when_ended(end)
        return arrived

    def _begin(self, places: list[Receiving], pages: NDArray[np.uint32], payload: Payload) -> Transfer:
        length = {place.slot.pages for place in places}
        if len(length) != 1:
            raise ProtocolError("blocks of one pull have one length")
        assert self._writer is not None
        ours = np.array([place.slot.page for place in places], np.uint32)
        return self._process.begin(self._writer[1], length.pop(), ours, pages, Deadline(payload.timeout_s))
