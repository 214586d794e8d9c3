"""What a reference policy is: a cache of single blocks that does not know chains."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvpool.bench.workload import Request


class BlockCache(Protocol):
    """A cache of a fixed number of blocks."""

    def __contains__(self, block: bytes) -> bool:
        """Whether the block is there; this uses nothing."""

    def use(self, block: bytes) -> None:
        """The block is used; if it is not there it comes in, and another goes."""


def block_hits(cache: BlockCache, requests: Sequence[Request]) -> Iterator[int]:
    """Leading blocks of each request that are there; then its blocks are used, from the tail to the head."""
    for request in requests:
        yield next((i for i, block in enumerate(request.hashes) if block not in cache), len(request.hashes))
        for block in reversed(request.hashes):
            cache.use(block)
