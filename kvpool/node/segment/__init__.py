"""Segments: the memory slots lie in. One file per kind of memory."""

from kvpool.node.segment.base import Extent, FetchedSegment, Segment, aligned
from kvpool.node.segment.shm import ShmSegment
from kvpool.node.segment.vram import VramSegment

__all__ = ["Extent", "FetchedSegment", "Segment", "ShmSegment", "VramSegment", "aligned"]
