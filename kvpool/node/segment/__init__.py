"""Segments: the memory slots lie in. One file per kind of memory."""

from kvpool.node.segment.base import Segment
from kvpool.node.segment.shm import ShmSegment

__all__ = ["Segment", "ShmSegment"]
