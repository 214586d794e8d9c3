"""Matching a long chain without sending all of it: first a few hashes, ever farther apart, then those that matter."""

from typing import Any

from kvpool.core.keys import hash_at
from kvpool.core.limits import HASH_BYTES
from kvpool.meta.store.link import RedisLink

DENSE_BLOCKS = 128
"""Shorter chains are sent whole: a few kilobytes cost less than asking twice may."""

Matched = tuple[int, bytes, int, int]
"""(blocks, why it ends, number of the lease within the namespace, blocks but for the lease cap)."""


def match(link: RedisLink, prefix: str, hashes: bytes, first: int, lease_us: int, share: float) -> Matched:
    """See `Directory.match`; a chain that is all there costs one exchange of O(log n) hashes."""
    blocks = len(hashes) // HASH_BYTES
    tail = (blocks, first, lease_us, share)
    answer: list[Any] = [b"between", 0]
    low, high = 0, blocks
    if blocks > DENSE_BLOCKS:
        probes = _probes(blocks)
        packed = b"".join(hash_at(hashes, probe) for probe in probes)
        answer = link.call(prefix, "match_sparse", packed, *tail)
        if answer[0] == b"between":
            missing = answer[1]
            low, high = (probes[missing - 1] if missing else 0), probes[missing] + 1
    if answer[0] == b"between":
        answer = link.call(prefix, "match", hashes[low * HASH_BYTES : high * HASH_BYTES], low, *tail)
    if answer[0] == b"again":
        answer = link.call(prefix, "match", hashes, 0, *tail)
    _, matched, reason, lease, whole = answer
    return matched, reason, int(lease), whole


def _probes(blocks: int) -> list[int]:
    """Where the directory in memory gallops to."""
    probes, low, step = [], 0, 1
    while low < blocks:
        probes.append(min(low + step, blocks) - 1)
        low, step = probes[-1] + 1, step * 2
    return probes
