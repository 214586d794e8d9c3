"""Copies that verify as they go: every byte arrives, and the checksum is that of the destination."""

import numpy as np
import pytest
import xxhash

from kvpool.transport.copying import CHUNK_BYTES, as_array, checksum, gather, scatter

SEED = 0x1234_5678_9ABC_DEF0
SIZES = [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17]
CUTS = {
    "whole": lambda size: [size],
    "halves": lambda size: [size // 2, size - size // 2],
    "bytes first": lambda size: [min(1, size), 0, size - min(1, size)],
    "long first": lambda size: [size - size // 3, size // 3],
}

pytestmark = pytest.mark.parametrize("cut", CUTS)


def random_bytes(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def blank_pieces(sizes):
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("size", SIZES)
def test_scatter_fills_the_pieces_and_gives_their_checksum(size, cut):
    source, pieces = random_bytes(size), blank_pieces(CUTS[cut](size))

    digest = scatter(source, pieces, SEED)

    assert source.tobytes() == b"".join(pieces)
    assert xxhash.xxh3_64_intdigest(source.tobytes(), SEED) == digest == checksum(pieces, SEED)


@pytest.mark.parametrize("size", SIZES)
def test_gather_fills_the_destination_and_gives_its_checksum(size, cut):
    source, pieces = random_bytes(size), blank_pieces(CUTS[cut](size))
    scatter(source, pieces, SEED)
    destination = np.zeros(size, np.uint8)

    digest = gather(pieces, destination, SEED)

    assert source.tobytes() == destination.tobytes()
    assert xxhash.xxh3_64_intdigest(source.tobytes(), SEED) == digest


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_one_changed_byte_anywhere_changes_the_checksum(position, cut):
    size = 2 * CHUNK_BYTES + 1
    pieces = blank_pieces(CUTS[cut](size))
    intact = checksum(pieces, SEED)
    changed = np.zeros(size, np.uint8)
    changed[position] = 1

    assert scatter(changed, pieces, SEED) != intact


def test_another_seed_gives_another_checksum(cut):
    pieces = blank_pieces(CUTS[cut](100))

    assert checksum(pieces, SEED) != checksum(pieces, SEED + 1)


def test_a_source_of_another_length_is_no_silent_success(cut):
    pieces = blank_pieces(CUTS[cut](100))

    with pytest.raises(ValueError, match="broadcast"):
        scatter(np.zeros(99, np.uint8), pieces, SEED)


def test_an_array_shares_the_memory_of_its_view(cut):
    pieces = blank_pieces(CUTS[cut](100))

    as_array(pieces[0])[0] = 7

    assert pieces[0][0] == 7
