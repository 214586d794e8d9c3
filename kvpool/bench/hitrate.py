"""Counts the hit rates a pool is measured against: the same engines without a pool, and one infinite cache.

Definition, the same for every rate the demo prints: hit tokens / input tokens over all requests, cold start
included. A request hits its longest leading run of resident full blocks, looked up on the state before the
request; the partial tail block is never stored and counts as computed (0.02 points on Mooncake's
conversation trace, nothing where a trace lists full blocks only).
"""

from kvpool.bench.engine import PageCache, engine_of
from kvpool.bench.workload import Workload

DEFINITION = (
    "hit tokens / input tokens over all requests, cold start included; a hit is the longest leading run of "
    "full blocks resident before the request; the partial tail block counts as computed"
)


def ideal_hit_rate(workload: Workload) -> float:
    """The rate of one cache that never evicts."""
    seen: set[bytes] = set()
    hit_blocks = 0
    for request in workload.requests:
        # In a chain of hashes nothing after the first unseen block was seen, so counting is the leading run.
        hit_blocks += sum(block in seen for block in request.hashes)
        seen.update(request.hashes)
    return hit_rate(hit_blocks, workload)


def private_hit_rate(workload: Workload, engines: int, engine_pages: int) -> float:
    """The rate of ``engines`` caches of ``engine_pages`` blocks each that share nothing, in that order."""
    caches = [PageCache(engine_pages) for _ in range(engines)]
    hit_blocks = 0
    for i, request in enumerate(workload.requests):
        cache = caches[engine_of(i, engines)]
        hit_blocks += cache.match(request.hashes)
        cache.admit(request.hashes)
    return hit_rate(hit_blocks, workload)


def hit_rate(hit_blocks: int, workload: Workload) -> float:
    """The rate of so many hits over all requests of ``workload``."""
    return hit_blocks * workload.block_tokens / workload.input_tokens
