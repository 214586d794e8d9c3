"""Block hashes: what callers may give, and the reference chain."""

import hashlib

import pytest

from kvpool.core.errors import InvalidHashError, UsageError
from kvpool.core.keys import chain_hashes, count_hashes, pack_hashes, split_hashes
from kvpool.core.limits import HASH_BYTES

ONE, TWO = b"\x01" * HASH_BYTES, b"\x02" * HASH_BYTES


@pytest.mark.parametrize(
    "hashes",
    [ONE + TWO, bytearray(ONE + TWO), memoryview(ONE + TWO), [ONE, TWO], (ONE, TWO), iter([ONE, TWO])],
    ids=["bytes", "bytearray", "memoryview", "list", "tuple", "iterator"],
)
def test_a_chain_may_be_packed_or_one_string_a_block(hashes):
    assert pack_hashes(hashes, 2) == ONE + TWO


def test_packing_and_splitting_are_inverse():
    assert split_hashes(pack_hashes([ONE, TWO], 2)) == [ONE, TWO]


@pytest.mark.parametrize("length", [0, 1, 16, 31, 33])
def test_a_hash_of_another_length_is_refused_with_its_place(length):
    with pytest.raises(InvalidHashError, match=rf"hashes\[1\] is {length} bytes"):
        pack_hashes([ONE, bytes(length)], 2)


def test_a_hash_that_is_not_bytes_is_refused_with_its_type():
    with pytest.raises(InvalidHashError, match=r"hashes\[0\] is str"):
        pack_hashes(["a" * HASH_BYTES], 1)


@pytest.mark.parametrize("packed", [b"\x00" * 31, b"\x00" * 33, ONE + b"\x00"])
def test_packed_hashes_must_be_whole(packed):
    with pytest.raises(InvalidHashError, match=f"{len(packed)} bytes, not a multiple of {HASH_BYTES}"):
        count_hashes(packed, 10)


@pytest.mark.parametrize("nothing", [b"", []])
def test_no_hash_at_all_is_refused(nothing):
    with pytest.raises(InvalidHashError, match="at least one block"):
        pack_hashes(nothing, 10)


def test_the_limit_is_named_when_a_batch_is_too_large():
    assert count_hashes(ONE * 3, 3) == 3
    with pytest.raises(InvalidHashError, match="4 hashes in one call; the limit is 3"):
        count_hashes(ONE * 4, 3)


def test_a_bad_hash_is_a_usage_error_and_a_value_error():
    with pytest.raises(UsageError):
        pack_hashes(b"", 1)
    with pytest.raises(ValueError, match="no hashes"):
        pack_hashes(b"", 1)


def test_the_reference_chain_hashes_its_parent_and_its_tokens():
    first = hashlib.sha256(b"\x01\x00\x00\x00\x02\x00\x00\x00").digest()
    second = hashlib.sha256(first + b"\x03\x00\x00\x00\x04\x00\x00\x00").digest()

    assert chain_hashes([1, 2, 3, 4], 2) == [first, second]


def test_a_chain_covers_full_blocks_only():
    assert chain_hashes([1, 2, 3], 4) == []
    assert chain_hashes([1, 2, 3, 4, 5], 2) == chain_hashes([1, 2, 3, 4], 2)


def test_a_chain_can_be_continued_from_a_parent():
    whole = chain_hashes([1, 2, 3, 4], 1)

    assert chain_hashes([3, 4], 1, parent=whole[1]) == whole[2:]


def test_chains_part_where_their_tokens_do():
    left, right = chain_hashes([1, 2, 3, 4], 1), chain_hashes([1, 2, 9, 4], 1)

    assert [a == b for a, b in zip(left, right, strict=True)] == [True, True, False, False]
