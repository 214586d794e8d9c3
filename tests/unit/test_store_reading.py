"""Reading from a node's store: only what is committed, and it stays until it has left."""

import numpy as np
import pytest
from real_store import NAMESPACE, SEGMENT_ID, WRITER

from kvpool.core.directory import FreeSlot
from kvpool.core.errors import ProtocolError, UsageError
from kvpool.core.limits import PAGE_BYTES


def test_only_committed_slots_of_that_generation_are_read(node, store, prepared):
    reservation, slots, generations = prepared
    slot, generation = int(slots[0]), int(generations[0])
    assert store.pin(slot, generation, 10) is None

    node.commit_slots(reservation, slots, generations)

    assert store.pin(slot, generation + 1, 10) is None
    assert store.pin(slot + 1, generation, 10) is None
    assert len(store.pin(slot, generation, 10)) == 10


def test_a_read_beyond_its_slot_is_refused_and_pins_nothing(node, store):
    [slot], [generation] = node.write()

    with pytest.raises(ProtocolError, match=f"holds at most {2 * PAGE_BYTES} bytes, not {2 * PAGE_BYTES + 1}"):
        store.pin(slot, generation, 2 * PAGE_BYTES + 1)
    store.free_headers(store.inventory())
    assert node.in_use() == (0, 0)


def test_bytes_that_are_being_sent_stay_until_they_have_left(node, store):
    [slot], [generation] = node.write()
    view = store.pin(slot, generation, NAMESPACE.block_bytes)
    store.apply([FreeSlot(1, SEGMENT_ID, slot, generation, rest=False)])

    assert store.pin(slot, generation, 10) is None
    assert store.stats().used_bytes == 2 * PAGE_BYTES
    assert bytes(view) == bytes(NAMESPACE.block_bytes)

    store.unpin([(slot, generation)])
    assert node.in_use() == (0, 0)


def test_another_segment_is_none_of_this_nodes(store):
    for call in (
        lambda: store.payload(b"x" * 16),
        lambda: store.check_segment(b""),
        lambda: store.commit_slots(b"x" * 16, 1, WRITER, *[np.zeros(0)] * 3),
    ):
        with pytest.raises(UsageError, match="is not of this node; ask the directory again"):
            call()
    assert store.payload(SEGMENT_ID) is store.segment.payload
