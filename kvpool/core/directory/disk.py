"""What waits to be copied between a node's memory and its disk."""

from collections import deque
from dataclasses import dataclass, field

from kvpool.core.directory.segments import Segment


@dataclass(slots=True)
class Disk:
    """One node's disk segment and its queues. Rows in them may be other blocks' by the time their turn comes.

    Attributes:
        segment: The disk.
        read: Rows of blocks in the node's memory that were read for the first time, the longest ago first.
        leaving: Rows of blocks to be copied to disk next, ancestors first, with their hashes.
        wanted: Rows of blocks that were read from the disk.
    """

    segment: Segment
    read: deque[int] = field(default_factory=deque)
    leaving: dict[int, bytes] = field(default_factory=dict)
    wanted: deque[int] = field(default_factory=deque)
