"""When a service that has just started knows what its nodes hold: until then what it does not know is no news.

Nothing durable says which nodes there were. So the service is told how many to expect, or waits: long enough for every
node to have dialled again, from the last one that did.
"""

from kvpool.core.clock import Clock


class Recovery:
    """Nodes that have joined and reported since the start. Not thread-safe: its shell holds one lock.

    Args:
        clock: Monotonic seconds.
        expected_nodes: Nodes to wait for; 0 when nobody knows.
        wait_s: Without a number: how long no further node must have joined.
        deadline_s: Time after which it is over, whoever is missing.
    """

    def __init__(self, clock: Clock, expected_nodes: int, wait_s: float, deadline_s: float) -> None:
        self.expected_nodes = expected_nodes
        self._clock = clock
        self._wait_s = wait_s
        self._began_s = self._joined_at_s = clock()
        self._deadline_s = self._began_s + deadline_s
        self._ended_s: float | None = None
        self._reporting: set[str] = set()
        self._reported: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether some of the nodes that there were may not have reported."""
        return self._ended_s is None

    @property
    def reported_nodes(self) -> int:
        """Nodes here now whose inventories are complete."""
        return len(self._reported)

    @property
    def lasted_s(self) -> float:
        """Seconds from the start to the end, or to now."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._began_s

    def joined(self, node_id: str) -> None:
        """The node has dialled in; its inventory follows."""
        self._reported.discard(node_id)
        self._reporting.add(node_id)
        self._joined_at_s = self._clock()

    def reported(self, node_id: str) -> None:
        """The node's inventory is complete."""
        self._reporting.discard(node_id)
        self._reported.add(node_id)

    def left(self, node_id: str) -> None:
        """The node is gone."""
        self._reporting.discard(node_id)
        self._reported.discard(node_id)

    def end(self) -> None:
        """Others know that it is over."""
        if self._ended_s is None:
            self._ended_s = self._clock()

    def ends(self) -> bool:
        """Whether it ends now: once."""
        if self._ended_s is not None or not self._is_over():
            return False
        self._ended_s = self._clock()
        return True

    def _is_over(self) -> bool:
        now_s = self._clock()
        if now_s >= self._deadline_s:
            return True
        if self._reporting or not self._reported:
            return False
        if self.expected_nodes:
            return len(self._reported) >= self.expected_nodes
        return now_s - self._joined_at_s >= self._wait_s
