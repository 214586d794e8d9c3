"""Write grants of a reservation: one or more for each segment and shard, sealed for the segment's node."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.directory import Directory, ReserveResult, Share
from kvpool.core.grants import Grant, seal
from kvpool.core.keys import select_hashes
from kvpool.core.members import Members
from kvpool.core.namespace import Namespace
from kvpool.transport.wire.messages import SegmentGrant, pack

GRANT_BLOCKS_MAX = 256
GRANT_BYTES = 16 << 20
"""Blocks and bytes of one grant: while a writer moves one, its node commits the one before and prepares the next."""


@dataclass(frozen=True, slots=True)
class Granting:
    """Seals what a directory has placed.

    Args:
        directory: Knows the segments.
        members: Know their nodes' sessions and keys.
        incarnation: Of the service.
    """

    directory: Directory
    members: Members
    incarnation: int

    def grants(self, namespace: Namespace, result: ReserveResult, chain: bytes, ttl_s: float) -> list[SegmentGrant]:
        """The grants of ``result``; ``chain`` begins with the hash above the reserved slice."""
        step = max(1, min(GRANT_BLOCKS_MAX, GRANT_BYTES // namespace.block_bytes))
        return [
            SegmentGrant(
                segment=number,
                shard=shard,
                blocks=pack(part.indexes, "<u4"),
                grant=self._seal(number, shard, part, chain, namespace, result.reservation, ttl_s),
            )
            for (number, shard), share in result.shares.items()
            for part in _parts(share, step)
        ]

    def _seal(
        self,
        number: int,
        shard: int,
        share: Share,
        chain: bytes,
        namespace: Namespace,
        reservation: int,
        ttl_s: float,
    ) -> bytes:
        segment = self.directory.segment(number)
        member = self.members.get(segment.node_id)
        assert member is not None, "an open segment has a member"
        grant = Grant(
            incarnation=self.incarnation,
            session=member.session,
            reservation=reservation,
            segment_id=segment.segment_id,
            namespace=namespace.id,
            block_bytes=namespace.block_bytes,
            ttl_ms=int(ttl_s * 1000),
            hashes=select_hashes(chain, [index + 1 for index in share.indexes]),
            parents=select_hashes(chain, share.indexes),
            shard=shard,
            victim_slots=pack([order.slot for order in share.victims], "<u4"),
            victim_generations=pack([order.generation for order in share.victims], "<u8"),
        )
        return seal(grant, member.key)


def _parts(share: Share, step: int) -> Iterator[Share]:
    """The share in grants of at most ``step`` blocks; brought in order, and the first frees the victims."""
    for start in range(0, len(share.indexes), step):
        yield Share(share.indexes[start : start + step], share.victims if not start else [])
