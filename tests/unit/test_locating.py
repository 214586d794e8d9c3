"""What the service says of blocks' places: what cannot be is not used."""

import pytest

from kvpool.client.locating import _copies
from kvpool.core.directory import MissReason
from kvpool.core.errors import ProtocolError
from kvpool.transport.wire.messages import LocateReply, pack


def reply(blocks, count, reason=""):
    """An answer whose copies are in slots 0, 1, 2…"""
    copies = range(len(blocks))
    small, wide = pack(copies, "<u4"), pack(copies, "<u8")
    shards, segments = bytes(len(blocks)), pack(copies, "<u2")
    return LocateReply(count, reason, pack(blocks, "<u4"), shards, segments, small, wide, wide, None)


def test_one_copy_of_each_block_is_told_from_several():
    once, several = _copies(reply([0, 1, 2], 3), 3), _copies(reply([0, 0, 2], 2, "cold"), 3)

    assert (once.each_once, once.reason) == (True, None)
    assert (several.each_once, several.reason) == (False, MissReason.COLD)
    assert several.only(several.block == 0).slot.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("blocks", "count", "reason"),
    [([0, 3], 2, ""), ([0, 1, 3], 2, ""), ([1, 1], 2, ""), ([1, 0], 2, ""), ([0, 2, 1], 3, ""), ([0], 1, "bored")],
    ids=["beyond", "beyond with copies", "twice", "backwards", "mixed", "reason"],
)
def test_an_answer_that_cannot_be_is_refused(blocks, count, reason):
    with pytest.raises(ProtocolError):
        _copies(reply(blocks, count, reason), 3)
