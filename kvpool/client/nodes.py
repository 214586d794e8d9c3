"""The client's transports: one way to each node, the best that works, opened when first needed."""

import time
from functools import partial
from operator import methodcaller

from kvpool.client.breaker import Breaker
from kvpool.core.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.core.members import MemberState
from kvpool.transport import Transport, open_best, scheme_of
from kvpool.transport.deadline import Deadline
from kvpool.transport.once import OpenOnce
from kvpool.transport.wire.messages import NodeInfo, SegmentInfo, Topology


class Nodes:
    """Transports by node process. Thread-safe.

    Args:
        schemes: Schemes to use, in the order to try them.
        principal: Who is calling.
        streams: Connections that one large transfer may use.
    """

    def __init__(self, schemes: tuple[str, ...], principal: str, streams: int) -> None:
        for scheme in schemes:
            scheme_of(f"{scheme}://")
        self._schemes = schemes
        self._principal = principal
        self._streams = streams
        self._transports: OpenOnce[int, Transport] = OpenOnce("the client", methodcaller("close"))
        self._breakers: dict[int, Breaker] = {}
        self._segments: dict[int, tuple[NodeInfo, SegmentInfo]] = {}
        self._version = 0

    def find(self, number: int, topology: Topology) -> tuple[NodeInfo, SegmentInfo]:
        """The segment ``number`` and its node; raises UnavailableError when the topology does not know it."""
        if topology.version != self._version:
            self._update(topology)
        found = self._segments.get(number)
        if found is None:
            raise UnavailableError(f"segment {number} is of no node known here")
        return found

    def transport(self, node: NodeInfo, deadline: Deadline) -> Transport:
        """The transport to ``node``.

        Raises:
            UnavailableError: None of its endpoints can be reached with the schemes allowed.
        """
        return self._transports.get(node.incarnation, partial(self._try, node, deadline), deadline)

    def names(self) -> dict[int, str]:
        """Name of the transport in use, by node incarnation."""
        return {incarnation: transport.name for incarnation, transport in self._transports.items()}

    def close(self) -> None:
        """Close all transports."""
        self._transports.close()

    def _update(self, topology: Topology) -> None:
        alive = {node.incarnation for node in topology.nodes if node.state != MemberState.LOST}
        self._segments = {s.number: (node, s) for node in topology.nodes for s in node.segments}
        self._version = topology.version
        for incarnation in self.names():
            if incarnation not in alive:
                self._transports.drop(incarnation)

    def _try(self, node: NodeInfo, deadline: Deadline) -> Transport:
        breaker = self._breakers.setdefault(node.incarnation, Breaker(time.monotonic, failures_max=1))
        if not breaker.allows():
            raise UnavailableError(f"node {node.node_id} could not be reached lately")
        try:
            where = (node.node_id, node.endpoints, self._schemes, self._principal, node.incarnation, self._streams)
            return open_best(*where, deadline)
        except DeadlineError:
            raise  # this caller's time was short: that says nothing of the node
        except KvpoolError:
            breaker.failed()
            raise
