"""What clients learn of the nodes."""

from kvpool.core.members import Member, Members
from kvpool.transport.wire.messages import NodeInfo, SegmentInfo, Topology


class TopologyView:
    """The members as a topology, made anew when they have changed. Not thread-safe: its shell holds one lock."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._latest: Topology | None = None

    def since(self, known_version: int) -> Topology | None:
        """The topology, or None when the caller's version is the current one."""
        if known_version == self._members.version:
            return None
        if self._latest is None or self._latest.version != self._members.version:
            self._latest = Topology(self._members.version, [_node_info(member) for member in self._members])
        return self._latest


def _node_info(member: Member) -> NodeInfo:
    segments = [
        SegmentInfo(number, segment.segment_id, segment.medium, segment.capacity_bytes)
        for number, segment in zip(member.numbers, member.segments, strict=False)
    ]
    return NodeInfo(member.node_id, member.incarnation, member.state, list(member.endpoints), segments)
