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

_PAIRS = ((2, 3), (2, 3), (0, 1), (4, 5))
_SECRET = np.array(
    [
        [0x78E5C0CC4EE679CB, 0x8E2443F7744608B8, 0xBE4BA423396CFEB8, 0xDB979083E96DD4DE],
        [0x2172FFCC7DD05A82, 0x4C263A81E69035E0, 0x1CAD21F72C81017C, 0x1F67B3B7A4A44072],
    ],
    np.uint64,
)
"""XXH3 of 48 bytes adds four products of pairs of their words: which pairs, and the words of the secret for each."""

SIDE_BY_SIDE_MIN = 512

_START = np.uint64(_IDENTITY_BYTES * 0x9E3779B185EBCA87 & 0xFFFF_FFFF_FFFF_FFFF)
_PRIME_MX1 = np.uint64(0x165667919E3779F9)
_LOW, _HALF = np.uint64(0xFFFF_FFFF), np.uint64(32)

Generations = Sequence[int] | NDArray[np.uint64]


def block_seeds(namespace_seed: int, hashes: bytes, shard: int, generations: Generations, length: int) -> list[int]:
    """Checksum seeds of the blocks in packed ``hashes``, each ``length`` bytes long."""
    packed = _identities(hashes, shard, generations, length).tobytes()
    digest = xxhash.xxh3_64_intdigest
    return [digest(packed[i : i + _IDENTITY_BYTES], namespace_seed) for i in range(0, len(packed), _IDENTITY_BYTES)]


def block_seed_array(
    namespace_seed: int, hashes: bytes, shard: int, generations: Generations, length: int
) -> NDArray[np.uint64]:
    """`block_seeds` as an array; many are computed side by side, in a third of the time."""
    if len(hashes) < SIDE_BY_SIDE_MIN * HASH_BYTES:
        return np.array(block_seeds(namespace_seed, hashes, shard, generations, length), np.uint64)
    words = _identities(hashes, shard, generations, length).view(np.uint64).reshape(-1, _IDENTITY_BYTES // 8)
    seed = np.array([namespace_seed], np.uint64)  # an array: sums of scalars warn when they wrap
    evens, odds = ([pair[i] for pair in _PAIRS] for i in (0, 1))
    products = _folded(words[:, evens] ^ (_SECRET[0] + seed), words[:, odds] ^ (_SECRET[1] - seed))
    found: NDArray[np.uint64] = products.sum(axis=1, dtype=np.uint64) + _START
    found ^= found >> np.uint64(37)
    found *= _PRIME_MX1
    return found ^ found >> _HALF


def _identities(hashes: bytes, shard: int, generations: Generations, length: int) -> NDArray[np.void]:
    identity = np.empty(len(hashes) // HASH_BYTES, _IDENTITY)
    identity["hash"] = np.frombuffer(hashes, "V32")
    identity["generation"] = generations
    identity["length"] = length
    identity["shard"] = shard
    return identity


def _folded(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Low and high half of the 128-bit products, folded by XOR."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a_high * b_low
    cross = (a_low * b_low >> _HALF) + (middle & _LOW) + a_low * b_high
    high = (middle >> _HALF) + (cross >> _HALF) + a_high * b_high
    folded: NDArray[np.uint64] = a * b ^ high
    return folded


def payload_checksum(payload: bytes | memoryview, seed: int) -> int:
    """Checksum of one contiguous payload."""
    return xxhash.xxh3_64_intdigest(payload, seed)
