"""Reference eviction policies that `kvpool simulate` compares the pool's own with; no pool runs them.

Each is the published algorithm over single blocks, with the blocks of a request used from its tail to its head: so
that leaves go first, as a cache that does not know chains can have it. A request hits its longest leading run.
"""

from collections.abc import Callable

from kvpool.bench.policies.arc import Arc
from kvpool.bench.policies.base import BlockCache, block_hits
from kvpool.bench.policies.fifo import S3Fifo, Sieve, TwoQueues
from kvpool.bench.policies.optimal import optimal_hits

__all__ = ["REFERENCES", "BlockCache", "block_hits", "optimal_hits"]

REFERENCES: dict[str, Callable[[int], BlockCache]] = {
    "sieve": Sieve,
    "s3fifo": lambda blocks: S3Fifo(blocks, small=0.1, promote=2),
    "s3fifo-30": lambda blocks: S3Fifo(blocks, small=0.3, promote=1),
    "2q": lambda blocks: TwoQueues(blocks, window=0.3),
    "2q-50": lambda blocks: TwoQueues(blocks, window=0.5),
    "arc": Arc,
}
"""Caches of so many blocks, by name."""
