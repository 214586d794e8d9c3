"""Checksums that bind a block's bytes to its identity: xxh3-64, seeded.

Seed of a block = xxh3-64(hash 32 | generation u64 | length u32 | shard u32, little-endian; seed = namespace seed).
Checksum = xxh3-64(payload; seed = that seed). So intact bytes of another key, generation, shard, length or namespace
fail as surely as torn ones. It finds corruption and mix-ups, not malice.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpool.core.limits import HASH_BYTES

_IDENTITY = np.dtype([("hash", "V32"), ("generation", "<u8"), ("length", "<u4"), ("shard", "<u4")])
_IDENTITY_BYTES = _IDENTITY.itemsize

Generations = Sequence[int] | NDArray[np.uint64]


def block_seeds(namespace_seed: int, hashes: bytes, shard: int, generations: Generations, length: int) -> list[int]:
    """Checksum seeds of the blocks in packed ``hashes``, each ``length`` bytes long."""
    blocks = len(hashes) // HASH_BYTES
    identity = np.empty(blocks, _IDENTITY)
    identity["hash"] = np.frombuffer(hashes, "V32")
    identity["generation"] = generations
    identity["length"] = length
    identity["shard"] = shard
    packed = identity.tobytes()
    digest = xxhash.xxh3_64_intdigest
    return [digest(packed[i : i + _IDENTITY_BYTES], namespace_seed) for i in range(0, len(packed), _IDENTITY_BYTES)]


def payload_checksum(payload: bytes | memoryview, seed: int) -> int:
    """Checksum of one contiguous payload."""
    return xxhash.xxh3_64_intdigest(payload, seed)
