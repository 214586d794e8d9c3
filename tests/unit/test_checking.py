"""Checks of a node's blocks: changed bytes are found, never served again, and told to the directory once."""

import numpy as np
import pytest
from real_store import CHAIN, NAMESPACE, PAGES, QUARANTINE_S, SEGMENT_ID, Node

from kvpool.core.directory import FreeSlot, MissReason
from kvpool.core.limits import PAGE_BYTES
from kvpool.node.checking import Checked
from kvpool.node.headers import RECORD_BYTES
from kvpool.node.scrub import STEP_BYTES, Scrubber, verify
from kvpool.testing import ManualClock

LENGTH = NAMESPACE.block_bytes


def flip(node, page, offset, bit=0):
    node.segment.payload[page * PAGE_BYTES + offset] ^= 1 << bit


def check_all(store):
    return store.checks.walk(0, lambda _: False)


def test_sound_blocks_are_counted_and_stay(node, store):
    node.write(blocks=3)

    assert check_all(store) == Checked(PAGES, 3, 3 * LENGTH, 0)

    assert node.visible() == 3
    counters = store.stats().counters
    assert (counters["checked_blocks"], counters["checked_bytes"]) == (3, 3 * LENGTH)
    assert "bad_blocks" not in counters


@pytest.mark.parametrize("offset", [0, 1, LENGTH // 2, LENGTH - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_costs_its_block_and_no_other(node, store, offset, bit):
    slots, generations = node.write(blocks=3)
    flip(node, slots[1], offset, bit)

    assert check_all(store) == Checked(PAGES, 3, 3 * LENGTH, 1)

    assert node.visible() == 1
    assert node.service.explain(NAMESPACE.id, CHAIN[1]) == MissReason.VERIFY_FAILED
    assert store.pin(slots[1], generations[1], LENGTH) is None
    assert store.stats().counters["bad_blocks"] == 1
    assert node.service.status().stats.bad_blocks == 1
    assert check_all(store) == Checked(PAGES, 2, 2 * LENGTH, 0), "found once"


def test_bytes_behind_a_block_are_nobodys(node, store):
    [slot], _ = node.write()
    flip(node, slot, LENGTH)

    assert check_all(store).bad == 0


def test_bad_pages_are_never_given_out_again(node, store, clock):
    slots, _ = node.write(blocks=4)
    flip(node, slots[2], 5)
    check_all(store)
    store.free_headers(store.inventory())
    clock.advance(10 * QUARANTINE_S)
    store.expire()

    assert store.stats().used_bytes == 2 * PAGE_BYTES

    given = [slot.page for slot in node.slots.prepare(LENGTH, 4, 1, 10.0)]

    assert set(given) == {*slots} - {slots[2]}
    stats = store.stats()
    assert (stats.retired_bytes, stats.quarantined_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)


def test_a_restart_has_the_bad_pages_again_and_not_the_bad_block(tmp_path, clock):
    first = Node(tmp_path, clock)
    slots, _ = first.write(blocks=2)
    flip(first, slots[0], 5)
    check_all(first.store)
    first.close()

    again = Node(tmp_path, clock, restarted=True)

    assert [page for page, _ in again.store.inventory().named()] == [slots[1]]
    assert again.store.stats().used_bytes == 2 * PAGE_BYTES
    again.close()


def test_a_bad_header_costs_its_block_and_no_other(node, store):
    """Nobody can say which block it was, so the directory learns it from the next reader."""
    slots, generations = node.write(blocks=2)
    node.headers._records["hash"][slots[0]] = bytes(32)

    assert check_all(store).bad == 1

    assert store.pin(slots[0], generations[0], LENGTH) is None
    assert store.pin(slots[1], generations[1], LENGTH) is not None


@pytest.mark.parametrize("byte", range(4, RECORD_BYTES))
def test_a_restart_drops_just_the_block_with_a_bad_header(tmp_path, clock, byte):
    """Whichever byte of it changed (the first four are the state, which has no check of its own)."""
    first = Node(tmp_path, clock)
    slots, _ = first.write(blocks=3)
    raw = first.headers._records.view(np.uint8).reshape(PAGES, RECORD_BYTES)
    raw[slots[1], byte] ^= 0x10
    first.close()

    again = Node(tmp_path, clock, restarted=True)

    assert [page for page, _ in again.store.inventory().named()] == sorted([slots[0], slots[2]])
    again.slots.check_integrity()
    again.close()


def test_a_block_that_is_freed_while_it_is_checked_stays_until_then(node, store, monkeypatch):
    [slot], [generation] = node.write()

    def freed_meanwhile(check, view):
        store.apply([FreeSlot(1, SEGMENT_ID, slot, generation, rest=False)])
        assert store.stats().used_bytes == 2 * PAGE_BYTES
        return True

    monkeypatch.setattr("kvpool.node.checking._matches", freed_meanwhile)
    assert check_all(store).blocks == 1
    assert node.in_use() == (0, 0)


@pytest.mark.parametrize("bad", [False, True])
def test_what_a_reader_found_bad_is_looked_at_before_its_pages_are_used_again(node, store, clock, bad):
    [slot], [generation] = node.write()
    if bad:
        flip(node, slot, 77)
    node.service.report_bad(NAMESPACE.id, CHAIN[0], SEGMENT_ID, slot, generation)
    store.apply(node.service.wait_for_orders(node.member, 0, 0.0))

    assert store.checks.look_at_suspects().bad == bad

    clock.advance(QUARANTINE_S)
    store.expire()
    assert store.stats().retired_bytes == store.stats().used_bytes == bad * 2 * PAGE_BYTES
    assert store.checks.look_at_suspects().blocks == 0


def test_a_node_that_has_let_go_of_its_memory_calls_nothing_bad(node, store):
    node.write(blocks=2)
    node.segment.payload = np.empty(0, np.uint8)

    assert check_all(store) == Checked(PAGES)
    assert store.stats().retired_bytes == 0
    assert all(slot.pins == 0 for slot in node.slots)


def test_a_walk_goes_on_where_it_stopped(node, store):
    node.write(blocks=3)
    page, parts = 0, []
    while page < PAGES:
        part = store.checks.walk(page, lambda checked: checked.blocks == 1)
        page = part.next_page
        parts.append(part.blocks)

    assert parts == [1, 1, 1, 0]


def test_a_verify_without_time_checks_nothing_and_one_with_time_all(node, store):
    node.write(blocks=3)

    assert verify([store.checks], 0, 0.0)[0] == Checked(0)
    assert verify([store.checks], 0, 1.0)[0] == Checked(PAGES, 3, 3 * LENGTH)
    assert verify([store.checks], PAGES + 1, 1.0)[0] == Checked(PAGES + 1)


class ManualStop:
    """Stands for the event that ends the scrub: a wait takes no time but its own, on the clock."""

    def __init__(self, clock, waits):
        self.clock, self.waits = clock, waits
        self.waited = []

    def is_set(self):
        return len(self.waited) >= self.waits

    def wait(self, seconds):
        self.waited.append(seconds)
        self.clock.advance(seconds)
        return self.is_set()


def scrub(store, bytes_per_s, waits, interval_s=100.0):
    """Run a scrubber in this thread, on a clock of its own, for some waits; (scrubber, seconds of each wait)."""
    clock, idle = ManualClock(), []
    scrubber = Scrubber(store.checks, bytes_per_s, interval_s, idle.append, clock)
    scrubber._stopping = stop = ManualStop(clock, waits)
    scrubber._run()
    return scrubber, stop.waited, idle


def test_the_scrub_keeps_its_pace_and_gives_way(node, store):
    node.write(blocks=3)

    scrubber, waited, idle = scrub(store, bytes_per_s=LENGTH, waits=1)

    assert waited == [pytest.approx(3.0)], "three blocks at one block a second"
    assert len(idle) == 1, "it waited for the node to be idle first"
    assert scrubber.progress.passes == 1
    assert STEP_BYTES > 3 * LENGTH


def test_the_scrub_rests_between_passes(node, store):
    node.write()

    scrubber, waited, _ = scrub(store, bytes_per_s=1 << 30, waits=200, interval_s=10.0)

    assert scrubber.progress.passes == pytest.approx(sum(waited) / 10.0, abs=1)
    assert scrubber.progress.passes > 2


def test_a_scrub_that_is_off_looks_at_suspects_only(node, store):
    slots, generations = node.write(blocks=2)
    flip(node, slots[0], 3)
    flip(node, slots[1], 3)
    store.apply([FreeSlot(1, SEGMENT_ID, slots[1], generations[1], rest=True)])

    scrubber, _, _ = scrub(store, bytes_per_s=0, waits=5)

    assert scrubber.progress.passes == 0
    assert store.stats().counters["bad_blocks"] == 1
    assert store.stats().retired_bytes == 2 * PAGE_BYTES


def test_retired_memory_is_not_offered_and_at_least_a_page_stays(node):
    directory, total = node.service._directory, PAGES * PAGE_BYTES
    for retired, capacity in [(PAGE_BYTES, total - PAGE_BYTES), (2 * total, PAGE_BYTES), (0, total)]:
        directory.set_out_of_use(SEGMENT_ID, retired)
        assert directory.stats().capacity_bytes == capacity
        node.service.check_integrity()
