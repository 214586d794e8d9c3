"""Bytes that a node's store receives for its writers: checked in their slot, or the slot is lost."""

import numpy as np
from real_store import CHAIN, COMMITTED, NAMESPACE, OTHER, PAGES, STALE, WRITER, checksum_of

from kvpool.core.checksum import payload_checksum
from kvpool.core.limits import PAGE_BYTES


def receive(store, slots, generations, payload, checksum, owner=WRITER):
    """As the data plane does: the bytes go to their slot, and are checked there."""
    [receiving] = store.begin_receive(slots, generations, owner)
    receiving.view[:] = payload
    sound = payload_checksum(receiving.view, receiving.seed) == checksum
    store.end_receive([(receiving, sound)])
    return sound


def test_received_bytes_are_checked_over_the_slot(node, store, prepared):
    reservation, slots, generations = prepared
    payload = bytes(range(256)) * (NAMESPACE.block_bytes // 256) + bytes(NAMESPACE.block_bytes % 256)
    checksum = checksum_of(payload, CHAIN[0], int(generations[0]))

    assert receive(store, slots, generations, payload, checksum)
    assert node.commit_slots(reservation, slots, generations, [checksum]) == [COMMITTED]
    assert bytes(store.pin(int(slots[0]), int(generations[0]), len(payload))) == payload


def test_wrong_bytes_cost_the_slot(node, store, prepared):
    reservation, slots, generations = prepared
    payload = bytes(NAMESPACE.block_bytes)
    checksum = checksum_of(payload, CHAIN[0], int(generations[0]))

    assert not receive(store, slots, generations, payload[:-1] + b"\1", checksum)
    assert node.in_use() == (0, 0)
    assert node.commit_slots(reservation, slots, generations, [checksum]) == [STALE]
    assert store.stats().counters["bad_writes"] == 1


def test_bytes_that_do_not_arrive_whole_cost_the_slot(node, store, prepared):
    _, slots, generations = prepared
    [receiving] = store.begin_receive(slots, generations, WRITER)

    store.end_receive([(receiving, False)])

    assert node.in_use() == (0, 0)


def test_nobody_else_can_write_the_slot(node, store, prepared):
    reservation, slots, generations = prepared
    nowhere = np.array([PAGES + 5], np.uint32)

    assert store.begin_receive(slots, generations, OTHER) == [None]
    assert store.begin_receive(slots, generations + np.uint64(1), WRITER) == [None]
    assert store.begin_receive(nowhere, generations, WRITER) == [None]
    node.commit_slots(reservation, slots, generations)
    assert store.begin_receive(slots, generations, WRITER) == [None]


def test_pages_are_not_reused_while_bytes_still_arrive(node, store, prepared):
    """The writer is given up while its bytes arrive: the slot goes when they have, and is not committed."""
    reservation, slots, generations = prepared
    [receiving] = store.begin_receive(slots, generations, WRITER)
    store.drop_owner(WRITER)
    assert store.stats().used_bytes == 2 * PAGE_BYTES

    store.end_receive([(receiving, True)])
    assert node.in_use() == (0, 0)
    assert node.commit_slots(reservation, slots, generations) == [STALE]


def test_a_slot_named_twice_in_one_request_is_received_twice_and_let_go_twice(node, store, prepared):
    _, slots, generations = prepared
    twice = store.begin_receive(np.repeat(slots, 2), np.repeat(generations, 2), WRITER)

    store.end_receive([(twice[0], False), (twice[1], True)])

    assert node.in_use() == (0, 0)
