"""What the metadata service seals for a node: grants of a writer's reservation, and orders to fetch blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvpool.core.directory import Copy, Segment, Share
from kvpool.core.grants import Grant, seal
from kvpool.core.keys import select_hashes
from kvpool.core.limits import HASH_BYTES
from kvpool.core.members import Member
from kvpool.transport.wire.messages import SegmentGrant, pack
from kvpool.v1 import membership_pb2

GRANT_BLOCKS_MAX = 256
GRANT_BYTES = 16 << 20
"""Blocks and bytes of one grant: while a writer moves one, its node commits the one before and prepares the next."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Blocks to be written, and under which number.

    Attributes:
        incarnation: The metadata service's.
        reservation: The write token.
        namespace: Namespace id.
        block_bytes: Length of each shard.
        ttl_s: See `Grant`.
        chain: The blocks' hashes in order, packed, after the hash above the first (zeros for a root).
    """

    incarnation: int
    reservation: int
    namespace: bytes
    block_bytes: int
    ttl_s: float
    chain: bytes = b""

    def seal(self, segment: Segment, member: Member, shard: int, share: Share) -> Iterator[SegmentGrant]:
        """The grants of one rank on one segment of ``member``; brought in order, and the first frees the victims."""
        step = max(1, min(GRANT_BLOCKS_MAX, GRANT_BYTES // self.block_bytes))
        for start in range(0, len(share.indexes), step):
            indexes = share.indexes[start : start + step]
            hashes = select_hashes(self.chain, [index + 1 for index in indexes])
            victims = share.victims if not start else []
            grant = self.grant(segment, member, shard, hashes, select_hashes(self.chain, indexes))
            grant = msgspec.structs.replace(
                grant,
                victim_slots=pack([order.slot for order in victims], "<u4"),
                victim_generations=pack([order.generation for order in victims], "<u8"),
            )
            yield SegmentGrant(segment.number, shard, pack(indexes, "<u4"), seal(grant, member.key))

    def grant(self, segment: Segment, member: Member, shard: int, hashes: bytes, parents: bytes) -> Grant:
        """A grant without victims for the node's current session."""
        return Grant(
            incarnation=self.incarnation,
            session=member.session,
            reservation=self.reservation,
            segment_id=segment.segment_id,
            namespace=self.namespace,
            block_bytes=self.block_bytes,
            ttl_ms=int(self.ttl_s * 1000),
            hashes=hashes,
            parents=parents,
            shard=shard,
            victim_slots=b"",
            victim_generations=b"",
        )


def fetch_message(blocks: Slice, copy: Copy, source: Member, destination: Member) -> membership_pb2.FetchBlocks:
    """The order to fetch a copy's blocks from ``source``; ``blocks`` needs no chain."""
    parents = b"".join(parent or bytes(HASH_BYTES) for parent in copy.parents)
    grant = blocks.grant(copy.destination, destination, copy.shard, b"".join(copy.hashes), parents)
    return membership_pb2.FetchBlocks(
        grant=seal(grant, destination.key),
        source_node_id=source.node_id,
        source_incarnation=source.incarnation,
        source_endpoints=source.endpoints,
        source_segment_id=copy.source.segment_id,
        slot=copy.slots,
        generation=copy.generations,
        checksum=copy.checksums,
    )
