"""Write grants: what the metadata service allows a writer to store on one segment, sealed for the segment's node.

The writer carries the grant as opaque bytes; the node opens it with the key of its current session. So a node stores
only what the directory placed, and a grant of an older session, or of a restarted metadata service, opens nothing.
Format: msgpack array of the fields in order, then a 16-byte BLAKE2b tag keyed with the session's key.
"""

import hashlib
import hmac

import msgspec
import numpy as np

from kvpool.core.errors import ProtocolError
from kvpool.core.limits import BLOCK_BYTES_MAX, HASH_BYTES, NAMESPACE_ID_BYTES, RESERVE_BLOCKS_MAX, SHARDS_MAX

TAG_BYTES = 16
GRANT_KEY_BYTES_MAX = hashlib.blake2b.MAX_KEY_SIZE


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A grant for one shard of ``n`` blocks.

    Attributes:
        incarnation: The metadata service that gave it.
        session: The node session it was given for.
        reservation: The write token that commits must name.
        segment_id: Where to store.
        namespace: Namespace id.
        block_bytes: Length of every shard.
        ttl_ms: Slots not committed this long after `prepare` are freed.
        hashes: n hashes, packed.
        parents: n parents' hashes, packed; zeros for a root.
        shard: Which shard of the blocks.
        victim_slots: v uint32s: slots to free first.
        victim_generations: v uint64s.
    """

    incarnation: int
    session: int
    reservation: int
    segment_id: bytes
    namespace: bytes
    block_bytes: int
    ttl_ms: int
    hashes: bytes
    parents: bytes
    shard: int
    victim_slots: bytes
    victim_generations: bytes

    @property
    def count(self) -> int:
        """Blocks granted."""
        return len(self.hashes) // HASH_BYTES

    def victims(self) -> list[tuple[int, int]]:
        """(slot, generation) of each slot to free."""
        slots = np.frombuffer(self.victim_slots, "<u4").tolist()
        generations = np.frombuffer(self.victim_generations, "<u8").tolist()
        return list(zip(slots, generations, strict=True))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Grant)


def seal(grant: Grant, key: bytes) -> bytes:
    """The grant as bytes that only holders of ``key`` can make."""
    body = _ENCODER.encode(grant)
    return body + _tag(body, key)


def open_grant(sealed: bytes, key: bytes) -> Grant:
    """The grant in ``sealed``.

    Raises:
        ProtocolError: Not sealed with ``key`` (an older session's grant, or a forged one), or malformed.
    """
    body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
    if not hmac.compare_digest(_tag(body, key), tag):
        raise ProtocolError("the write grant is not of this node's current session; reserve again")
    try:
        grant = _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"write grant cannot be read: {error}") from error
    _check(grant)
    return grant


def _tag(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=TAG_BYTES).digest()


def _check(grant: Grant) -> None:
    count, rest = divmod(len(grant.hashes), HASH_BYTES)
    victims = len(grant.victim_slots) // 4
    sound = (
        rest == 0
        and 1 <= count <= RESERVE_BLOCKS_MAX
        and len(grant.parents) == len(grant.hashes)
        and 0 <= grant.shard < SHARDS_MAX
        and len(grant.namespace) == NAMESPACE_ID_BYTES
        and 1 <= grant.block_bytes <= BLOCK_BYTES_MAX
        and len(grant.victim_slots) == 4 * victims
        and len(grant.victim_generations) == 8 * victims
    )
    if not sound:
        raise ProtocolError("write grant with lengths that contradict each other")
