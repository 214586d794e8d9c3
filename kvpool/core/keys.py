"""Block hashes: checking what callers give, and the reference chain used by the demo and the tests.

Engines hash their own blocks; kvpool only carries the 32 bytes. Chains travel packed: ``hashes`` is the blocks' hashes
one after the other, in chain order.
"""

import hashlib
from collections.abc import Iterable, Sequence

from kvpool.core.errors import InvalidHashError
from kvpool.core.limits import HASH_BYTES, NAMESPACE_ID_BYTES

HashesLike = bytes | bytearray | memoryview | Iterable[bytes]
"""A chain: packed bytes, or one 32-byte string a block."""

NO_PARENT = b""
"""The parent of a chain's first block."""


def pack_hashes(hashes: HashesLike, blocks_max: int) -> bytes:
    """The chain as packed bytes.

    Raises:
        InvalidHashError: A hash that is not 32 bytes long, no hash at all, or more than ``blocks_max``.
    """
    if isinstance(hashes, bytes | bytearray | memoryview):
        packed = bytes(hashes)
    else:
        try:
            items = list(hashes)
        except TypeError as error:
            raise InvalidHashError(
                f"hashes is {type(hashes).__name__}; give packed bytes, or 32-byte strings"
            ) from error
        for i, item in enumerate(items):
            if not isinstance(item, bytes) or len(item) != HASH_BYTES:
                shown = f"{len(item)} bytes" if isinstance(item, bytes) else type(item).__name__
                raise InvalidHashError(f"hashes[{i}] is {shown}; a block hash is {HASH_BYTES} bytes, never truncated")
        packed = b"".join(items)
    count_hashes(packed, blocks_max)
    return packed


def count_hashes(packed: bytes, blocks_max: int) -> int:
    """Number of hashes in ``packed``; raises InvalidHashError as `pack_hashes` does."""
    blocks, rest = divmod(len(packed), HASH_BYTES)
    if rest:
        raise InvalidHashError(f"hashes are {len(packed)} bytes, not a multiple of {HASH_BYTES}")
    if not blocks:
        raise InvalidHashError("no hashes given; a call names at least one block")
    if blocks > blocks_max:
        raise InvalidHashError(f"{blocks} hashes in one call; the limit is {blocks_max}: split the batch")
    return blocks


def split_hashes(packed: bytes) -> list[bytes]:
    """One 32-byte string a block."""
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def checked_id(namespace_id: bytes) -> bytes:
    """``namespace_id``; raises InvalidHashError when it cannot be one."""
    if len(namespace_id) != NAMESPACE_ID_BYTES:
        raise InvalidHashError(f"namespace id of {len(namespace_id)} bytes; it has {NAMESPACE_ID_BYTES}")
    return namespace_id


def hash_at(packed: bytes, block: int) -> bytes:
    """The hash of one block."""
    return packed[block * HASH_BYTES : (block + 1) * HASH_BYTES]


def select_hashes(packed: bytes, blocks: Sequence[int]) -> bytes:
    """The hashes of some blocks (indexes, ascending), packed; a plain slice where they follow one another."""
    first, last = blocks[0], blocks[-1]
    if last - first + 1 == len(blocks):
        return packed[first * HASH_BYTES : (last + 1) * HASH_BYTES]
    return b"".join(hash_at(packed, block) for block in blocks)


def chain_hashes(tokens: Sequence[int], block_tokens: int, parent: bytes = NO_PARENT) -> list[bytes]:
    """Chained SHA-256 over the full blocks of ``tokens`` (unsigned 32-bit ids, little-endian).

    The reference chain of kvpool's own demo and tests; engines bring their own hashes.
    """
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + block_tokens])
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)
    return hashes
