"""The client's transports: one way to each node, opened when first needed; and which of several nodes to read from."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import methodcaller
from pathlib import Path

from kvpool.client.breaker import Breaker
from kvpool.core.directory import DISK, FETCHED
from kvpool.core.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.core.members import MemberState
from kvpool.ops.credentials import Credentials
from kvpool.transport import LOCAL_SCHEMES, Transport, Ways
from kvpool.transport.deadline import Deadline
from kvpool.transport.once import OpenOnce
from kvpool.transport.wire.messages import NodeInfo, SegmentInfo, Topology

AVOIDED_S = 1.0
"""How long a node that failed a read is the last choice."""

PATIENCE_S = 0.2
"""Calls with shorter deadlines do not count against a node when they run out."""


class Use(Enum):
    """What a node is wanted for; each has a circuit breaker: over `shm`, a node that hangs can still be read."""

    DIAL = 0
    READ = 1
    WRITE = 2


class Nodes:
    """Transports by node process. Thread-safe.

    Args:
        schemes: Schemes to use, in the order to try them.
        pool_uri: The pool's.
        principal: Who is calling.
        streams: Connections that one large transfer may use.
        credentials: What proves who is calling, over TLS; None: plaintext.
    """

    def __init__(
        self,
        schemes: tuple[str, ...],
        pool_uri: str,
        principal: str,
        streams: int,
        credentials: Credentials | None = None,
    ) -> None:
        self._ways = Ways(schemes, credentials)
        self._ways.prepare(pool_uri)
        self._principal = principal
        self._streams = streams
        self._transports: OpenOnce[int, Transport] = OpenOnce("the client", methodcaller("close"))
        self._breakers: dict[tuple[int, Use], Breaker] = {}
        self._segments: dict[int, tuple[NodeInfo, SegmentInfo]] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._reading_bytes: Counter[int] = Counter()
        self._avoided_until_s: dict[int, float] = {}

    def find(self, number: int, topology: Topology) -> tuple[NodeInfo, SegmentInfo]:
        """The segment ``number`` and its node; raises UnavailableError when the topology does not know it."""
        if topology.version != self._version:
            self._update(topology)
        found = self._segments.get(number)
        if found is None:
            raise UnavailableError(f"segment {number} is of no node known here")
        return found

    def transport(self, node: NodeInfo, deadline: Deadline, use: Use) -> Transport:
        """The transport to ``node``; the caller tells `judge` how it went.

        Raises:
            UnavailableError: None of its endpoints can be reached with the schemes allowed, or calls of this use
                failed several times in a row just now.
        """
        if use != Use.DIAL and not self._breaker(node, use).allows():
            raise UnavailableError(f"node {node.node_id} did not answer lately; it is tried again within a second")
        return self._transports.get(node.incarnation, partial(self._try, node, deadline), deadline)

    def cost(self, number: int, topology: Topology) -> tuple[bool, bool, bool, int, float]:
        """Orders the segments that a block could be read from, the best first.

        Nodes that failed lately come last, memory before disk, those of this host first, then the one with the fewest
        bytes under way.
        """
        try:
            node, segment = self.find(number, topology)
        except UnavailableError:
            return True, True, True, 0, 1.0
        fails = self._avoided_until_s.get(node.incarnation, 0.0) > time.monotonic()
        tie = random.random()  # noqa: S311 - spreads load, keeps no secret
        return fails, segment.medium == DISK, not self._is_local(node), self._reading_bytes[node.incarnation], tie

    def reading(self, node: NodeInfo, size_bytes: int) -> Callable[[], None]:
        """Bytes are read from ``node``, until what is returned is called."""
        with self._lock:
            self._reading_bytes[node.incarnation] += size_bytes
        return partial(self._has_read, node.incarnation, size_bytes)

    def judge(self, node: NodeInfo, use: Use, deadline: Deadline, *, failed: bool) -> None:
        """A call ended; where it failed or was late, others are better for a while."""
        if not failed:
            self._breaker(node, use).succeeded()
            return
        if use == Use.READ:
            self._avoided_until_s[node.incarnation] = time.monotonic() + AVOIDED_S
        if deadline.timeout_s >= PATIENCE_S:
            self._breaker(node, use).failed()

    def names(self) -> dict[int, str]:
        """Name of the transport in use, by node incarnation."""
        return {incarnation: transport.name for incarnation, transport in self._transports.items()}

    def reach(self, node: NodeInfo, deadline: Deadline) -> None:
        """Open the transport to ``node``, and the way to its memory; raises UnavailableError."""
        transport = self.transport(node, deadline, Use.DIAL)
        for segment in node.segments:
            if segment.medium not in FETCHED:
                transport.reach(segment.segment_id, deadline)

    def carriers(self) -> dict[int, str]:
        """What moves the bytes below the transport in use, where its name does not say so; by node incarnation."""
        return {incarnation: transport.carrier for incarnation, transport in self._transports.items()}

    def fallbacks(self) -> int:
        """Transports in use that run over something slower than they are meant for."""
        return sum(transport.fell_back for _, transport in self._transports.items())

    def close(self) -> None:
        """Close all transports."""
        self._transports.close()
        self._ways.close()

    def _has_read(self, incarnation: int, size_bytes: int) -> None:
        with self._lock:
            self._reading_bytes[incarnation] -= size_bytes

    def _is_local(self, node: NodeInfo) -> bool:
        """Whether the node is reached, or could be, without a network."""
        name = self.names().get(node.incarnation)
        if name is not None:
            return name in LOCAL_SCHEMES
        offered = [uri.partition("://") for uri in node.endpoints]
        usable = LOCAL_SCHEMES.intersection(self._ways.schemes)
        return any(s in usable and (s == "inproc" or Path(where).exists()) for s, _, where in offered)

    def _update(self, topology: Topology) -> None:
        alive = {node.incarnation for node in topology.nodes if node.state != MemberState.LOST}
        self._segments = {s.number: (node, s) for node in topology.nodes for s in node.segments}
        self._version = topology.version
        for incarnation in [i for i in self._avoided_until_s if i not in alive]:
            self._avoided_until_s.pop(incarnation, None)
        for incarnation, use in [key for key in list(self._breakers) if key[0] not in alive]:
            self._breakers.pop((incarnation, use), None)
        for incarnation in self.names():
            if incarnation not in alive:
                self._transports.drop(incarnation)

    def _breaker(self, node: NodeInfo, use: Use) -> Breaker:
        found = self._breakers.get((node.incarnation, use))
        if found is None:
            new = Breaker(time.monotonic, failures_max=1 if use == Use.DIAL else 3)
            found = self._breakers.setdefault((node.incarnation, use), new)
        return found

    def _try(self, node: NodeInfo, deadline: Deadline) -> Transport:
        breaker = self._breaker(node, Use.DIAL)
        if not breaker.allows():
            raise UnavailableError(f"node {node.node_id} could not be reached lately")
        try:
            who = (self._principal, node.incarnation, self._streams)
            transport = self._ways.open(node.node_id, node.endpoints, *who, deadline)
        except DeadlineError:
            raise  # this caller's time was short: that says nothing of the node
        except KvpoolError:
            breaker.failed()
            raise
        breaker.succeeded()
        return transport
