"""Write grants: only holders of the session's key can make one, and a sealed one cannot be changed."""

import msgspec
import pytest

from kvpool.core.errors import ProtocolError
from kvpool.core.grants import TAG_BYTES, Grant, open_grant, seal
from kvpool.core.limits import BLOCK_BYTES_MAX, RESERVE_BLOCKS_MAX, SHARDS_MAX
from kvpool.transport.wire.messages import pack

KEY = b"k" * 32
GRANT = Grant(
    incarnation=1,
    session=2,
    reservation=3,
    segment_id=b"s" * 16,
    namespace=b"n" * 32,
    block_bytes=100,
    ttl_ms=30_000,
    hashes=b"a" * 32 + b"b" * 32,
    parents=bytes(32) + b"a" * 32,
    shard=0,
    victim_slots=pack([7, 8], "<u4"),
    victim_generations=pack([70, 80], "<u8"),
)


def test_an_opened_grant_is_the_one_that_was_sealed():
    grant = open_grant(seal(GRANT, KEY), KEY)

    assert grant == GRANT
    assert grant.count == 2
    assert grant.victims() == [(7, 70), (8, 80)]


def test_a_grant_of_another_key_opens_nothing():
    with pytest.raises(ProtocolError, match="not of this node's current session; reserve again"):
        open_grant(seal(GRANT, KEY), b"K" * 32)


def test_no_bit_of_a_sealed_grant_can_be_changed():
    sealed = seal(GRANT, KEY)
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1 << position % 8
        with pytest.raises(ProtocolError):
            open_grant(bytes(changed), KEY)


@pytest.mark.parametrize("kept", range(0, TAG_BYTES * 2, 5))
def test_a_grant_cut_short_is_refused(kept):
    with pytest.raises(ProtocolError):
        open_grant(seal(GRANT, KEY)[:kept], KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"hashes": b"", "parents": b""},
        {"hashes": b"a" * 31, "parents": b"a" * 31},
        {"parents": bytes(32)},
        {"hashes": bytes(32) * (RESERVE_BLOCKS_MAX + 1), "parents": bytes(32) * (RESERVE_BLOCKS_MAX + 1)},
        {"namespace": b"n" * 31},
        {"shard": -1},
        {"shard": SHARDS_MAX},
        {"block_bytes": 0},
        {"block_bytes": BLOCK_BYTES_MAX + 1},
        {"victim_slots": b"123"},
        {"victim_generations": b""},
    ],
    ids="/".join,
)
def test_a_grant_that_contradicts_itself_is_refused(change):
    sealed = seal(msgspec.structs.replace(GRANT, **change), KEY)

    with pytest.raises(ProtocolError, match="contradict"):
        open_grant(sealed, KEY)


def test_a_sealed_body_that_is_no_grant_is_refused():
    class Other(msgspec.Struct, array_like=True):
        text: str = "no grant"

    with pytest.raises(ProtocolError, match="cannot be read"):
        open_grant(seal(Other(), KEY), KEY)
