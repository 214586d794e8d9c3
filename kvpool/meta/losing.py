"""Segments of nodes that went: closed at once, and emptied in slices while others have the lock in between."""

import threading
import time
from collections.abc import Sequence

from kvpool.core.directory import Directory
from kvpool.core.members import Member, MemberSegment
from kvpool.ops.logging import get_logger
from kvpool.v1 import common_pb2

LOSS_BLOCKS = 512
LOSS_PAUSE_S = 0.001
"""A lost segment is dropped so many blocks at a time, with pauses: who lets a lock go and takes it again at once keeps
out those who wait for it."""

log = get_logger(__name__)


class Losses:
    """What is being lost.

    Args:
        directory: Guarded by ``lock``.
        lock: The service's.

    Attributes:
        pending: Set when there is more to drop than the first slice.
    """

    def __init__(self, directory: Directory, lock: threading.Lock) -> None:
        self.pending = threading.Event()
        self._directory = directory
        self._lock = lock

    def begin(self, member: Member) -> None:
        """Close the segments of a member whose session is over, and drop the first slice; the caller holds the lock."""
        # As many as it has opened: the others may be of another node.
        for segment, _ in zip(member.segments, member.numbers, strict=False):
            self._directory.lose_segment(segment.segment_id)
        member.numbers.clear()
        self._drop_first()

    def failing(self, member: Member, segments: Sequence[common_pb2.Segment]) -> list[MemberSegment]:
        """Take in a member's segments as it sees them now; those that failed under it, which are closed.

        The caller holds the lock.
        """
        own, failed = {segment.segment_id for segment in member.segments}, []
        for segment in segments:
            if segment.segment_id not in own:
                continue
            if not segment.off:
                self._directory.set_out_of_use(segment.segment_id, segment.out_of_use_bytes)
                continue
            log.error("segment_off", node=member.node_id, medium=segment.medium, reason=segment.off)
            self._directory.lose_segment(segment.segment_id)
            failed.append(MemberSegment.of(segment))
        if failed:
            self._drop_first()
        return failed

    def finish(self) -> None:
        """Drop what is left."""
        while self._drop():
            time.sleep(LOSS_PAUSE_S)

    def _drop_first(self) -> None:
        if self._directory.drop_lost(LOSS_BLOCKS):
            self.pending.set()

    def _drop(self) -> int:
        with self._lock:
            return self._directory.drop_lost(LOSS_BLOCKS)
