"""A node's store and its directory: orders, inventories and what is found again after a restart."""

import pytest
from real_store import CHAIN, NAMESPACE, QUARANTINE_S, SEGMENT_ID, WRITER, Node, no_change

from kvpool.core.directory import FreeSlot, MissReason
from kvpool.core.limits import PAGE_BYTES


@pytest.mark.parametrize(("segment_id", "later"), [(b"x" * 16, 0), (SEGMENT_ID, 1)], ids=["segment", "generation"])
def test_orders_for_something_else_change_nothing(node, store, segment_id, later):
    [slot], [generation] = node.write()

    with no_change(node):
        store.apply([FreeSlot(1, segment_id, slot, generation + later, rest=False)])


def test_an_order_to_rest_keeps_the_pages_for_readers_that_map_them(node, store, clock):
    [slot], [generation] = node.write()

    store.apply([FreeSlot(1, SEGMENT_ID, slot, generation, rest=True)])

    assert len(store.inventory()) == 0
    assert node.in_use() == (1, 2 * PAGE_BYTES)
    clock.advance(QUARANTINE_S)
    store.expire()
    assert node.in_use() == (0, 0)


def test_a_bad_block_rests_by_order_of_the_directory(node, store):
    [slot], [generation] = node.write()
    node.service.report_bad(NAMESPACE.id, CHAIN[0], SEGMENT_ID, slot, generation)

    store.apply(node.service.wait_for_orders(node.member, 0, 0.0))

    assert store.stats().quarantined_bytes == 2 * PAGE_BYTES
    assert node.service.explain(NAMESPACE.id, CHAIN[0]) == MissReason.VERIFY_FAILED


def test_the_inventory_is_what_was_committed(node, store):
    slots, generations = node.write(blocks=2)
    store.prepare(node.reserve(first=2)[1], WRITER)

    inventory = store.inventory()

    assert inventory.named() == sorted(zip(slots, generations, strict=True))
    records = inventory.records
    assert set(records[["hash", "parent"]].tolist()) == {(CHAIN[0], bytes(32)), (CHAIN[1], CHAIN[0])}
    assert set(records[["namespace", "length", "shard"]].tolist()) == {(NAMESPACE.id, NAMESPACE.block_bytes, 0)}


def test_slots_that_the_directory_does_not_want_are_freed(node, store):
    node.write(blocks=2)

    store.free_headers(store.inventory().select(slice(1)))

    assert node.in_use() == (1, 2 * PAGE_BYTES)


def test_a_restarted_node_has_its_blocks_and_gives_no_generation_twice(tmp_path, clock):
    first = Node(tmp_path, clock)
    slots, generations = first.write(blocks=2)
    first.store.prepare(first.reserve(first=2)[1], WRITER)
    before = first.store.inventory()
    first.close()

    again = Node(tmp_path, clock, restarted=True)
    assert again.in_use() == (3, 6 * PAGE_BYTES)
    fresh, fresh_generations = again.store.prepare(again.reserve()[1], WRITER)

    assert again.store.inventory().records.tolist() == before.records.tolist()
    assert again.store.stats().quarantined_bytes == 2 * PAGE_BYTES
    assert fresh[0] not in slots
    assert fresh_generations[0] > max(generations) + 1
    again.close()
