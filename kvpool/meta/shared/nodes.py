"""What nodes do to the shared state: they join, announce, are ready, drain, fall silent, leave.

A node may go from one service to another at any time; its blocks stay. When it joins anew its segments get new numbers,
and what they held under the old ones stays readable until the inventory says under the new ones what is still there.
"""

from collections.abc import Callable, Sequence

from kvpool.core.directory import DISK
from kvpool.core.errors import UsageError
from kvpool.core.members import Member, MemberSegment, MemberState
from kvpool.meta.shared.members import MemberRecord, Said
from kvpool.meta.shared.state import State
from kvpool.ops.logging import get_logger
from kvpool.transport.wire.messages import NodeInfo, SegmentInfo, Topology
from kvpool.v1 import common_pb2

log = get_logger(__name__)


def join(
    state: State,
    node_id: str,
    incarnation: int,
    endpoints: tuple[str, ...],
    segments: tuple[MemberSegment, ...],
    version: str,
    server: int,
) -> Member:
    """A node dials in here; see `MetaService.join`."""
    if any(segment.medium == DISK for segment in segments):
        raise UsageError("a pool whose state is in Redis has no disk tier yet; start the node without --disk")
    record, before = state.members.join(node_id, incarnation, endpoints, segments, version, server)
    in_use = [segment for segment in segments if not segment.off]
    earlier = _keep(state, before, {segment.segment_id for segment in in_use}) if before is not None else []
    numbers = []
    for segment in in_use:
        number = state.store.add_segment(segment.segment_id, node_id, segment.capacity_bytes, segment.medium)
        state.store.set_accepting(segment.segment_id, accepting=False)
        numbers.append(number)

    def numbered(changed: MemberRecord) -> None:
        changed.numbers, changed.earlier = numbers, earlier

    after = state.members.update(node_id, record.session, numbered)
    if after is None:
        raise UsageError(f"node {node_id!r} joined elsewhere at the same time")
    return after.member(state.clock(), state.members.since_s(after.session), Said())


def ready(state: State, member: Member) -> bool:
    """The node's inventory is complete; False when its session is over."""

    def admitted(changed: MemberRecord) -> None:
        changed.state = MemberState.DRAINING if changed.drains else MemberState.READY
        changed.earlier = []

    record = state.members.update(member.node_id, member.session, admitted)
    if record is None:
        return False
    state.store.settle_inventory(member.node_id)
    for segment_id, _, _, off in record.segments:
        if not off:
            state.store.set_accepting(segment_id, accepting=not record.drains)
    return True


def draining(state: State, member: Member) -> bool:
    """The node takes no new blocks; False when its session is over."""

    def drains(changed: MemberRecord) -> None:
        changed.drains = True
        if changed.state == MemberState.READY:
            changed.state = MemberState.DRAINING

    record = state.members.update(member.node_id, member.session, drains)
    for segment_id, _, _, _ in record.segments if record is not None else ():
        state.store.set_accepting(segment_id, accepting=False)
    return record is not None


def lose(state: State, node_id: str, session: int) -> bool:
    """The session is over, and what the directory had of it goes; False when it was over already."""

    def lost(changed: MemberRecord) -> None:
        changed.state, changed.earlier = MemberState.LOST, []

    record = state.members.update(node_id, session, lost)
    if record is None:
        return False
    for segment_id, _, _, _ in record.segments:
        state.store.lose_segment(segment_id)
    state.store.settle_inventory(node_id)
    return True


def set_quiet(state: State, record: MemberRecord, *, quiet: bool) -> None:
    """While a ready node has not been heard of for long, others are better for new blocks."""
    if record.state == MemberState.READY and not record.drains:
        for segment_id in record.in_use():
            state.store.set_accepting(segment_id, accepting=not quiet)


def lose_late(state: State, member: Member, segment_id: bytes, namespace_id: bytes) -> None:
    """The session had ended when it brought this: drop what was taken after others had dropped the rest."""
    for segment, number in zip(member.segments, member.numbers, strict=False):
        if segment.segment_id == segment_id:
            state.store.lose_late(number, namespace_id)


def take_segments(state: State, member: Member, segments: Sequence[common_pb2.Segment]) -> None:
    """The node's segments as it sees them now: some of their bytes, or all of them, may be out of use."""
    own = {segment.segment_id for segment in member.segments}
    for said in segments:
        if said.segment_id not in own:
            continue
        if not said.off:
            state.store.set_out_of_use(said.segment_id, said.out_of_use_bytes)
            continue
        log.error("segment_off", node=member.node_id, medium=said.medium, reason=said.off)
        state.store.lose_segment(said.segment_id)
        state.members.update(member.node_id, member.session, _turn_off(said.segment_id, said.off))
        member.segments = tuple(s for s in member.segments if s.segment_id != said.segment_id)


def topology(state: State) -> Topology:
    """What clients learn of the nodes."""
    nodes = []
    for member in state.members:
        segments = [
            SegmentInfo(number, segment.segment_id, segment.medium, segment.capacity_bytes)
            for number, segment in zip(member.numbers, member.segments, strict=False)
        ]
        record = state.members.record(member.node_id)
        if record is not None:
            segments += [SegmentInfo(n, s, medium, capacity) for n, s, medium, capacity in record.earlier]
        nodes.append(NodeInfo(member.node_id, member.incarnation, member.state, list(member.endpoints), segments))
    return Topology(state.members.version, nodes)


def _keep(state: State, before: MemberRecord, coming: set[bytes]) -> list[tuple[int, bytes, str, int]]:
    """What stays readable of a node that joins anew: the segments that it brings again."""
    earlier = [segment for segment in before.earlier if segment[1] in coming]
    in_use = [segment for segment in before.segments if not segment[3]]
    for number, (segment_id, medium, capacity_bytes, _) in zip(before.numbers, in_use, strict=False):
        if segment_id in coming and before.state != MemberState.LOST:
            state.store.keep_for_inventory(segment_id)
            earlier.append((number, segment_id, medium, capacity_bytes))
        else:
            state.store.lose_segment(segment_id)
    return earlier


def _turn_off(segment_id: bytes, why: str) -> Callable[[MemberRecord], None]:
    def change(changed: MemberRecord) -> None:
        kept = zip(changed.numbers, changed.in_use(), strict=False)
        changed.numbers = [number for number, own in kept if own != segment_id]
        changed.segments = [(s[0], s[1], s[2], why if s[0] == segment_id else s[3]) for s in changed.segments]

    return change
