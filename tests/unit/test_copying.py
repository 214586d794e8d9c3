"""Copies that verify as they go: every byte arrives in its place, and each checksum is that of the destination."""

import numpy as np
import pytest
import xxhash

from kvpool.core.limits import PAGE_BYTES
from kvpool.transport.blocks import Blocks
from kvpool.transport.copying import CHUNK_BYTES, checksum, checksums_side_by_side, fits, load_slots, store_slots

LENGTHS = [
    1,
    PAGE_BYTES - 1,
    PAGE_BYTES,
    PAGE_BYTES + 1,
    3 * PAGE_BYTES,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + PAGE_BYTES,
    2 * CHUNK_BYTES + 17,
]
ORDERS = {"neighbours": [0, 1, 2, 3], "gaps": [0, 1, 3, 4], "backwards": [3, 2, 1, 0], "single": [2]}
"""Which extents of the segment the blocks lie in, each as long as a slot of the block."""
CUTS = {
    "whole": lambda length: [length],
    "halves": lambda length: [length // 2, length - length // 2],
    "one byte first": lambda length: [1, 0, length - 1],
    "last third": lambda length: [length - length // 3, length // 3],
}


def random_bytes(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def slots_of(order, length):
    pages = -(-length // PAGE_BYTES)
    return np.array([extent * pages for extent in ORDERS[order]], np.uint32)


def segment_for(length):
    return random_bytes(5 * -(-length // PAGE_BYTES) * PAGE_BYTES)


def side_by_side(count, length):
    return Blocks(length, whole=np.zeros(count * length, np.uint8))


def in_pieces(count, length, cut="halves"):
    return Blocks(length, pieces=[[memoryview(bytearray(n)) for n in CUTS[cut](length)] for _ in range(count)])


def contents(blocks):
    return [b"".join(blocks.pieces(i)) for i in range(len(blocks))]


def in_slots(payload, slots, length):
    return [payload[slot * PAGE_BYTES :][:length].tobytes() for slot in slots.tolist()]


def digests(payloads, seeds):
    return [xxhash.xxh3_64_intdigest(payload, seed) for payload, seed in zip(payloads, seeds, strict=True)]


MEMORY = {"side by side": side_by_side} | {
    f"pieces: {cut}": lambda count, length, cut=cut: in_pieces(count, length, cut) for cut in CUTS
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("memory", MEMORY)
def test_loading_fills_the_callers_blocks_and_gives_their_checksums(memory, order, length):
    payload, slots = segment_for(length), slots_of(order, length)
    blocks, seeds = MEMORY[memory](len(slots), length), [11 + i for i in range(len(slots))]

    found = load_slots(payload, slots, blocks, seeds)

    assert in_slots(payload, slots, length) == contents(blocks)
    assert digests(contents(blocks), seeds) == found


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("memory", MEMORY)
def test_storing_fills_the_slots_and_nothing_else_and_gives_their_checksums(memory, order, length):
    slots = slots_of(order, length)
    blocks, seeds = MEMORY[memory](len(slots), length), [11 + i for i in range(len(slots))]
    load_slots(segment_for(length), slots, blocks, seeds)
    payload = np.zeros_like(segment_for(length))

    found = store_slots(payload, slots, blocks, seeds)

    assert contents(blocks) == in_slots(payload, slots, length)
    assert digests(contents(blocks), seeds) == found
    assert np.count_nonzero(payload) == sum(np.count_nonzero(np.frombuffer(b, np.uint8)) for b in contents(blocks))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_one_changed_byte_changes_the_checksum_of_its_block_only(memory, position):
    length = 2 * CHUNK_BYTES + 1
    slots = slots_of("neighbours", length)
    payload, seeds = segment_for(length), [1, 2, 3, 4]
    intact = load_slots(payload, slots, MEMORY[memory](4, length), seeds)
    payload[int(slots[2]) * PAGE_BYTES + position] ^= 1

    changed = load_slots(payload, slots, MEMORY[memory](4, length), seeds)

    assert [a == b for a, b in zip(intact, changed, strict=True)] == [True, True, False, True]


def test_checksums_of_pieces_and_of_blocks_side_by_side_agree():
    payload, seeds = random_bytes(30), [5, 6, 7]
    pieces = [[payload[i * 10 : i * 10 + 3].data, payload[i * 10 + 3 : i * 10 + 10].data] for i in range(3)]

    assert checksums_side_by_side(payload.data, 10, seeds) == [
        checksum(p, s) for p, s in zip(pieces, seeds, strict=True)
    ]
    assert checksum([payload.data], 5) == checksum([payload[:1].data, payload[1:].data], 5)


@pytest.mark.parametrize(
    ("slots", "length", "expected"),
    [
        ([], 1, True),
        ([0, 3], PAGE_BYTES, True),
        ([3], PAGE_BYTES + 1, False),
        ([4], 1, False),
        ([0xFFFF_FFFF], 1, False),
        ([0xFFFF_FFFF, 0], 1 << 30, False),
    ],
)
def test_slots_beyond_the_segment_do_not_fit(slots, length, expected):
    assert fits(np.zeros(4 * PAGE_BYTES, np.uint8), np.array(slots, np.uint32), length) == expected


def test_nothing_fits_a_segment_that_was_closed():
    assert not fits(np.zeros(0, np.uint8), np.array([0], np.uint32), 1)
