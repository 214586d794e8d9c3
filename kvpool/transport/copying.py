"""Copies that verify as they go: bytes are hashed in their destination while they are warm in the cache.

NumPy's copy and xxhash both release the interpreter lock, so other threads of an engine go on meanwhile.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpool.core.limits import PAGE_BYTES
from kvpool.ops.failpoints import failpoint
from kvpool.transport.blocks import Blocks, Bytes, DeviceMemory, FarBlocks, Moved, Pieces

GROUP_BYTES = 1 << 20
"""Neighbouring small blocks are copied together up to this, then hashed one by one: a copy gets faster up to 1 MiB."""

CHUNK_BYTES = 2 << 20
"""Larger blocks are copied and hashed in chunks of this, while they are in the cache."""


def load_slots(payload: Bytes, slots: NDArray[np.uint32], blocks: Blocks, seeds: list[int]) -> list[int]:
    """Copy slots of a mapped segment into the caller's blocks; the checksum of each block in its destination.

    The slots must lie within ``payload``.
    """
    length, whole = blocks.block_bytes, blocks.whole
    if whole is None:
        sources = (payload[slot * PAGE_BYTES :][:length] for slot in slots.tolist())
        return [scatter(source, blocks.pieces(i), seeds[i]) for i, source in enumerate(sources)]
    checksums: list[int] = []
    for first, end, start in _runs(slots, length):
        source = payload[start : start + (end - first) * length]
        checksums += _copy_run(whole[first * length : end * length], source, length, seeds[first:end])
    return checksums


def store_slots(payload: Bytes, slots: NDArray[np.uint32], blocks: Blocks, seeds: list[int]) -> list[int]:
    """Copy the caller's blocks into slots of a mapped segment; the checksum of each block in its slot.

    The slots must lie within ``payload`` and belong to the caller.
    """
    length, whole = blocks.block_bytes, blocks.whole
    if whole is None:
        destinations = (payload[slot * PAGE_BYTES :][:length] for slot in slots.tolist())
        return [_gather(blocks.pieces(i), destination, seeds[i]) for i, destination in enumerate(destinations)]
    checksums: list[int] = []
    for first, end, start in _runs(slots, length):
        destination = payload[start : start + (end - first) * length]
        checksums += _copy_run(destination, whole[first * length : end * length], length, seeds[first:end])
    return checksums


def begin_store_slots(
    payload: Bytes | DeviceMemory, slots: NDArray[np.uint32], blocks: Blocks, seeds: list[int]
) -> Moved:
    """`store_slots`, but blocks in far memory are only begun; what is returned answers the checksums."""
    if isinstance(blocks, FarBlocks):
        return blocks.begin_store(payload, starts_of(slots), lambda: seeds, lasting=True)
    assert not isinstance(payload, DeviceMemory), "only far blocks are moved to a device"
    checksums = np.array(store_slots(payload, slots, blocks, seeds), np.uint64)
    return lambda: checksums


def starts_of(slots: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Where slots begin in their segment, in bytes."""
    return slots.astype(np.uint64) * np.uint64(PAGE_BYTES)


def fits(payload: Bytes | DeviceMemory, slots: NDArray[np.uint32], length: int) -> bool:
    """Whether blocks of ``length`` bytes in these slots lie within ``payload``."""
    return not len(slots) or int(slots.max()) * PAGE_BYTES + length <= len(payload)


def checksum(pieces: Pieces, seed: int) -> int:
    """The checksum of what the pieces hold."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0], seed)
    digest = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def checksums_side_by_side(view: memoryview, length: int, seeds: list[int]) -> list[int]:
    """The checksums of blocks of ``length`` bytes that lie side by side in ``view``."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[i * length : (i + 1) * length], seed) for i, seed in enumerate(seeds)]


def _runs(slots: NDArray[np.uint32], length: int) -> Iterator[tuple[int, int, int]]:
    """(first, end, byte offset) of the stretches of ``slots`` in which each begins where the one before it ends."""
    pages, rest = divmod(length, PAGE_BYTES)
    if rest or len(slots) == 1:
        cuts = list(range(1, len(slots)))
    else:
        cuts = (np.flatnonzero(slots[1:] != slots[:-1] + np.uint32(pages)) + 1).tolist()
    for first, end in itertools.pairwise([0, *cuts, len(slots)]):
        yield first, end, int(slots[first]) * PAGE_BYTES


def _copy_run(destination: Bytes, source: Bytes, length: int, seeds: list[int]) -> list[int]:
    """Copy neighbouring blocks, a chunk at a time; the checksum of each in ``destination``."""
    checksums: list[int] = []
    if length > CHUNK_BYTES:
        for i, seed in enumerate(seeds):
            digest = xxhash.xxh3_64(seed=seed)
            _copy_chunks(destination[i * length : (i + 1) * length], source[i * length : (i + 1) * length], digest)
            checksums.append(digest.intdigest())
        return checksums
    step = max(1, GROUP_BYTES // length)
    for first in range(0, len(seeds), step):
        part = slice(first * length, (first + step) * length)
        np.copyto(destination[part], source[part])
        checksums += checksums_side_by_side(destination[part].data, length, seeds[first : first + step])
    return checksums


def scatter(source: Bytes, pieces: Pieces, seed: int) -> int:
    """Copy ``source`` over the pieces; the checksum of what the pieces hold then."""
    if len(pieces) == 1 and len(source) <= CHUNK_BYTES:
        np.copyto(np.frombuffer(pieces[0], np.uint8), source)
        return xxhash.xxh3_64_intdigest(pieces[0], seed)
    digest = xxhash.xxh3_64(seed=seed)
    start = 0
    for piece in pieces:
        _copy_chunks(np.frombuffer(piece, np.uint8), source[start : start + len(piece)], digest)
        start += len(piece)
    return digest.intdigest()


def _gather(pieces: Pieces, destination: Bytes, seed: int) -> int:
    """Copy the pieces into ``destination``; the checksum of what it holds then."""
    if len(pieces) == 1 and len(destination) <= CHUNK_BYTES:
        np.copyto(destination, np.frombuffer(pieces[0], np.uint8))
        return xxhash.xxh3_64_intdigest(destination.data, seed)
    digest = xxhash.xxh3_64(seed=seed)
    start = 0
    for piece in pieces:
        _copy_chunks(destination[start : start + len(piece)], np.frombuffer(piece, np.uint8), digest)
        start += len(piece)
    return digest.intdigest()


def _copy_chunks(destination: Bytes, source: Bytes, digest: xxhash.xxh3_64) -> None:
    for start in range(0, len(destination), CHUNK_BYTES):
        chunk = destination[start : start + CHUNK_BYTES]
        np.copyto(chunk, source[start : start + CHUNK_BYTES])
        digest.update(chunk.data)
        failpoint("client.copy.mid_block")
