"""Belady's policy with bypass for prefix hits: what a cache that knows the future would hit, nearly.

The block whose next use is farthest away goes, the deeper one of two; a block that is used later than all others does
not come in. Next uses of a chain's blocks never come earlier with depth, so prefixes stay closed. It is a reference,
not a proven optimum: hits of a request count only up to the first miss.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from kvpool.bench.workload import Request

_NEVER = 1 << 62

_Entry = tuple[int, int, bytes]
"""(-number of the next request, -depth, block): the smallest goes first."""


def optimal_hits(requests: Sequence[Request], blocks: int) -> Iterator[int]:
    """Leading blocks of each request that are there, in a cache of ``blocks``."""
    next_uses = _next_uses(requests)
    held: dict[bytes, tuple[int, int]] = {}
    heap: list[_Entry] = []
    for request, uses in zip(requests, next_uses, strict=True):
        hits = next((i for i, block in enumerate(request.hashes) if block not in held), len(request.hashes))
        yield hits
        for depth, (block, use) in enumerate(zip(request.hashes, uses, strict=True)):
            held.pop(block, None)
            if use == _NEVER:
                continue
            entry = (-use, -depth, block)
            if len(held) >= blocks and not _evict_later(held, heap, entry):
                continue
            held[block] = entry[:2]
            heappush(heap, entry)


def _evict_later(held: dict[bytes, tuple[int, int]], heap: list[_Entry], new: _Entry) -> bool:
    """Evict the block used last of all, unless the new one is that."""
    while heap and held.get(heap[0][2]) != heap[0][:2]:
        heappop(heap)
    if not heap or heap[0] >= new:
        return False
    del held[heappop(heap)[2]]
    return True


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each block of each request the number of the next request that has it."""
    later: dict[bytes, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        hashes = requests[number].hashes
        found.append([later.get(block, _NEVER) for block in hashes])
        later.update(dict.fromkeys(hashes, number))
    found.reverse()
    return found
