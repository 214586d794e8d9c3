"""What a node counts of the requests that it serves."""

import threading
from collections import Counter

from kvpool.ops.metrics import latencies
from kvpool.transport.cuda import MapRequest
from kvpool.transport.ucx.messages import OfferRequest, PullRequest, RegisterRequest
from kvpool.transport.wire.messages import (
    AttachRequest,
    CommitSlotsRequest,
    DiscardRequest,
    Message,
    Ping,
    PrepareRequest,
    ReadRequest,
    WriteRequest,
)

REQUESTS: dict[type[Message], str] = {
    ReadRequest: "read",
    WriteRequest: "write",
    PrepareRequest: "prepare",
    CommitSlotsRequest: "commit",
    DiscardRequest: "discard",
    AttachRequest: "attach",
    MapRequest: "map",
    OfferRequest: "offer",
    RegisterRequest: "register",
    PullRequest: "pull",
    Ping: "ping",
}
"""What a node is asked on its data plane, as metrics call it."""

DIRECTIONS = ("in", "out")
TRANSPORTS = ("unix", "tcp")


class NodeMeter:
    """Times and bytes of the data plane, all connections together. Thread-safe."""

    def __init__(self) -> None:
        self.times = latencies(REQUESTS.values())
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def served(self, request: Message, seconds: float, transport: str, received_bytes: int, sent_bytes: int) -> None:
        """A request was answered, or its answer is about to be sent."""
        self.times[REQUESTS[type(request)]].observe(seconds)
        if received_bytes or sent_bytes:
            with self._lock:
                self._bytes["in", transport] += received_bytes
                self._bytes["out", transport] += sent_bytes

    def moved_by_way(self) -> dict[str, int]:
        """The same as it is told over the wire: ``"out tcp"``; what has moved nothing is left out."""
        return {f"{way} {transport}": size for (way, transport), size in self.moved_bytes().items() if size}

    def moved_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes by direction and transport."""
        with self._lock:
            return {(way, transport): self._bytes[way, transport] for way in DIRECTIONS for transport in TRANSPORTS}
