"""Checksums are bound to everything that identifies a block's bytes."""

import struct

import numpy as np
import pytest
import xxhash

from kvpool.core.checksum import SIDE_BY_SIDE_MIN, block_seed_array, block_seeds, payload_checksum

HASHES = bytes(range(64))
PAYLOAD = bytes(4096)


def test_a_seed_is_the_digest_of_the_packed_identity():
    identity = HASHES[32:] + struct.pack("<QII", 9, 4096, 3)
    expected = xxhash.xxh3_64_intdigest(identity, 77)

    assert block_seeds(77, HASHES, shard=3, generations=[8, 9], length=4096)[1] == expected


def test_one_seed_a_block_whatever_carries_the_generations():
    listed = block_seeds(77, HASHES, 0, [8, 9], 4096)

    assert listed == block_seeds(77, HASHES, 0, np.array([8, 9], np.uint64), 4096)
    assert listed == block_seeds(77, HASHES[:32], 0, [8], 4096) + block_seeds(77, HASHES[32:], 0, [9], 4096)


@pytest.mark.parametrize("blocks", [1, SIDE_BY_SIDE_MIN - 1, SIDE_BY_SIDE_MIN, 2 * SIDE_BY_SIDE_MIN + 1])
@pytest.mark.parametrize("namespace_seed", [0, 77, 2**64 - 1])
def test_many_seeds_side_by_side_are_the_same(blocks, namespace_seed):
    rng = np.random.default_rng(blocks)
    identity = (namespace_seed, rng.bytes(32 * blocks), 65_535, rng.integers(0, 2**64, blocks, np.uint64), 2**32 - 1)

    assert block_seed_array(*identity).tolist() == block_seeds(*identity)


@pytest.mark.parametrize(
    "other",
    [
        {"namespace_seed": 78},
        {"hashes": HASHES[1:33]},
        {"shard": 1},
        {"generations": [9]},
        {"generations": [(1 << 63) + 8]},
        {"length": 4095},
    ],
)
def test_intact_bytes_of_another_identity_fail(other):
    identity = {"namespace_seed": 77, "hashes": HASHES[:32], "shard": 0, "generations": [8], "length": 4096}
    (own,), (foreign,) = block_seeds(**identity), block_seeds(**identity | other)

    assert payload_checksum(PAYLOAD, own) != payload_checksum(PAYLOAD, foreign)


def test_a_changed_or_shortened_payload_fails():
    checksum = payload_checksum(PAYLOAD, 1)

    assert payload_checksum(PAYLOAD[:-1] + b"\x01", 1) != checksum
    assert payload_checksum(PAYLOAD[:-1], 1) != checksum
    assert payload_checksum(memoryview(bytearray(PAYLOAD)), 1) == checksum
