"""The nodes, as gRPC tells of them: what a client needs to reach them, and what people look at."""

import dataclasses

from kvpool.core.limits import NO_NUMBER
from kvpool.core.members import Scrub
from kvpool.meta.results import MetaStatus
from kvpool.meta.serving import Serving
from kvpool.transport.wire.messages import Topology
from kvpool.v1 import common_pb2


def nodes_message(service: Serving) -> common_pb2.Topology:
    """The nodes and how they are reached: what a client needs of them."""
    topology = service.topology(0) or Topology(0, [])
    nodes = [
        common_pb2.Node(
            node_id=node.node_id,
            incarnation=node.incarnation,
            state=node.state,
            endpoints=node.endpoints,
            segments=[
                common_pb2.Segment(
                    number=segment.number,
                    segment_id=segment.segment_id,
                    medium=segment.medium,
                    capacity_bytes=segment.capacity_bytes,
                )
                for segment in node.segments
            ],
        )
        for node in topology.nodes
    ]
    return common_pb2.Topology(version=topology.version, nodes=nodes)


def topology_message(status: MetaStatus, *, whole: bool = True) -> common_pb2.Topology:
    """The nodes with their use, as gRPC tells it; not ``whole``: without what says who moves how much."""
    topology: Topology = status.topology
    nodes = []
    for node in topology.nodes:
        segments = [
            common_pb2.Segment(
                number=segment.number,
                segment_id=segment.segment_id,
                medium=segment.medium,
                capacity_bytes=segment.capacity_bytes,
                used_bytes=status.used.get(segment.number, (0, 0))[0],
                blocks=status.used.get(segment.number, (0, 0))[1],
            )
            for segment in node.segments
        ]
        segments += [
            common_pb2.Segment(
                number=NO_NUMBER,
                segment_id=segment.segment_id,
                medium=segment.medium,
                capacity_bytes=segment.capacity_bytes,
                off=segment.off,
            )
            for segment in status.off.get(node.node_id, ())
        ]
        nodes.append(
            common_pb2.Node(
                node_id=node.node_id,
                incarnation=node.incarnation,
                state=node.state,
                endpoints=node.endpoints,
                segments=segments,
                scrub=common_pb2.Scrub(**dataclasses.asdict(status.scrubs.get(node.node_id, Scrub())))
                if whole
                else None,
                fetched_bytes=status.fetched_bytes.get(node.node_id) if whole else None,
                moved_bytes=status.moved_bytes.get(node.node_id) if whole else None,
                version=status.versions.get(node.node_id, ""),
            )
        )
    return common_pb2.Topology(version=topology.version, nodes=nodes)


def _scrub(status: MetaStatus, node_id: str) -> common_pb2.Scrub:
    return common_pb2.Scrub(**dataclasses.asdict(status.scrubs.get(node_id, Scrub())))
