"""Copies that verify as they go: bytes are hashed in their destination while they are warm in the cache.

NumPy's copy and xxhash both release the interpreter lock, so other threads of an engine go on meanwhile.
"""

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpool.transport.base import Pieces

CHUNK_BYTES = 256 << 10
"""Copied, then hashed: small enough to stay in the second-level cache, large enough to make calls cheap."""

Bytes = NDArray[np.uint8]


def as_array(view: memoryview) -> Bytes:
    """The same memory as a flat array."""
    return np.frombuffer(view, np.uint8)


def scatter(source: Bytes, pieces: Pieces, seed: int) -> int:
    """Copy ``source`` over the pieces; the checksum of what the pieces hold then."""
    if len(pieces) == 1 and len(source) <= CHUNK_BYTES:
        destination = np.frombuffer(pieces[0], np.uint8)
        np.copyto(destination, source)
        return xxhash.xxh3_64_intdigest(destination.data, seed)
    digest = xxhash.xxh3_64(seed=seed)
    start = 0
    for piece in pieces:
        end = start + len(piece)
        _copy_chunks(np.frombuffer(piece, np.uint8), source[start:end], digest)
        start = end
    return digest.intdigest()


def gather(pieces: Pieces, destination: Bytes, seed: int) -> int:
    """Copy the pieces into ``destination``; the checksum of what it holds then."""
    if len(pieces) == 1 and len(destination) <= CHUNK_BYTES:
        np.copyto(destination, np.frombuffer(pieces[0], np.uint8))
        return xxhash.xxh3_64_intdigest(destination.data, seed)
    digest = xxhash.xxh3_64(seed=seed)
    start = 0
    for piece in pieces:
        end = start + len(piece)
        _copy_chunks(destination[start:end], np.frombuffer(piece, np.uint8), digest)
        start = end
    return digest.intdigest()


def checksum(pieces: Pieces, seed: int) -> int:
    """The checksum of what the pieces hold."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0], seed)
    digest = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def _copy_chunks(destination: Bytes, source: Bytes, digest: xxhash.xxh3_64) -> None:
    for start in range(0, len(destination), CHUNK_BYTES):
        chunk = destination[start : start + CHUNK_BYTES]
        np.copyto(chunk, source[start : start + CHUNK_BYTES])
        digest.update(chunk.data)
