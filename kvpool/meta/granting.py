"""What is sealed for a node: grants for each segment and shard of a reservation, and orders to fetch blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvpool.core.directory import Copy, ReserveResult, Segment, Share
from kvpool.core.grants import Grant, seal
from kvpool.core.keys import select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.core.members import Member
from kvpool.core.namespace import Namespace
from kvpool.meta.read_granting import ReadGranting
from kvpool.transport.wire.messages import SegmentGrant, pack
from kvpool.v1 import membership_pb2

GRANT_BLOCKS_MAX = 256
GRANT_BYTES = 16 << 20
"""Blocks and bytes of one grant: while a writer moves one, its node commits the one before and prepares the next."""


class Segments(Protocol):
    """See `Directory`."""

    def segment(self, number: int) -> Segment: ...  # noqa: D102
    def namespaces(self) -> list[Namespace]: ...  # noqa: D102


class Nodes(Protocol):
    """See `Members`."""

    def get(self, node_id: str) -> Member | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Granting:
    """Seals what a directory has placed.

    Args:
        directory: Knows the segments.
        members: Know their nodes' sessions and keys.
        incarnation: Of the service.
        reads: Seals what a copy is read under.
    """

    directory: Segments
    members: Nodes
    incarnation: int
    reads: ReadGranting

    def grants(self, namespace: Namespace, result: ReserveResult, chain: bytes, ttl_s: float) -> list[SegmentGrant]:
        """The grants of ``result``; ``chain`` begins with the hash above the reserved slice."""
        step = max(1, min(GRANT_BLOCKS_MAX, GRANT_BYTES // namespace.block_bytes))
        grants: list[SegmentGrant] = []
        for (number, shard), share in result.shares.items():
            segment = self.directory.segment(number)
            for part in _parts(share, step):
                grant = self._grant(result.reservation, segment, namespace, shard, ttl_s)
                grant = msgspec.structs.replace(
                    grant,
                    hashes=select_hashes(chain, [index + 1 for index in part.indexes]),
                    parents=select_hashes(chain, part.indexes),
                    victim_slots=pack([order.slot for order in part.victims], "<u4"),
                    victim_generations=pack([order.generation for order in part.victims], "<u8"),
                )
                sealed = seal(grant, self._member(segment).key)
                grants.append(SegmentGrant(number, shard, pack(part.indexes, "<u4"), sealed))
        return grants

    def fetch(self, copy: Copy, source: Member, ttl_s: float) -> membership_pb2.FetchBlocks:
        """The order to fetch a copy's blocks from ``source``, with a grant like any writer's."""
        namespace = self.directory.namespaces()[copy.namespace]
        grant = msgspec.structs.replace(
            self._grant(copy.number, copy.destination, namespace, copy.shard, ttl_s),
            hashes=b"".join(copy.hashes),
            parents=b"".join(parent or bytes(HASH_BYTES) for parent in copy.parents),
        )
        return membership_pb2.FetchBlocks(
            grant=seal(grant, self._member(copy.destination).key),
            source_node_id=source.node_id,
            source_incarnation=source.incarnation,
            source_endpoints=source.endpoints,
            source_segment_id=copy.source.segment_id,
            slot=copy.slots,
            generation=copy.generations,
            checksum=copy.checksums,
            source_grant=self.reads.grant(source, namespace.id),
        )

    def _grant(self, number: int, segment: Segment, namespace: Namespace, shard: int, ttl_s: float) -> Grant:
        """A grant without blocks for the current session of the segment's node."""
        return Grant(
            incarnation=self.incarnation,
            session=self._member(segment).session,
            reservation=number,
            segment_id=segment.segment_id,
            namespace=namespace.id,
            block_bytes=namespace.block_bytes,
            ttl_ms=int(ttl_s * 1000),
            hashes=b"",
            parents=b"",
            shard=shard,
            victim_slots=b"",
            victim_generations=b"",
        )

    def _member(self, segment: Segment) -> Member:
        member = self.members.get(segment.node_id)
        assert member is not None, "an open segment has a member"
        return member


def _parts(share: Share, step: int) -> Iterator[Share]:
    """The share in grants of at most ``step`` blocks; brought in order, and the first frees the victims."""
    for start in range(0, len(share.indexes), step):
        yield Share(share.indexes[start : start + step], share.victims if not start else [])
