"""A node's slots under writers, readers, time and restarts: pages are never in two hands, and always come back.

The oracle is a plain list of what was given out; free pages are what is left of the segment.
"""

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import Slot, Slots, SlotState
from kvpool.testing import ManualClock

PAGES = 24
QUARANTINE_S = 30.0
TTL_MAX_S = 20.0

picks = st.integers(0, 1_000_000)
owners = st.integers(1, 3)
WRITING, COMMITTED, RESTING = SlotState.WRITING, SlotState.COMMITTED, SlotState.QUARANTINED


@dataclass
class Held:
    """What the oracle knows of one slot that was given out and whose pages have not come back."""

    slot: Slot
    page: int
    pages: int
    generation: int
    owner: int
    until_s: float
    state: SlotState
    bound: bool = False
    pins: int = 0
    doomed: bool = False
    retired: bool = False

    @property
    def name(self) -> tuple[int, int]:
        return self.page, self.generation


class SlotsMachine(RuleBasedStateMachine):
    """Every call a node makes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.slots = Slots(PAGES, self.clock, quarantine_s=QUARANTINE_S)
        self.held: list[Held] = []
        self.gone: list[tuple[int, int]] = []
        self.last_generation = 0

    # Writers

    @rule(
        length=st.integers(1, 6 * PAGE_BYTES),
        count=st.integers(1, 5),
        owner=owners,
        ttl_s=st.sampled_from((0.0, 5.0, TTL_MAX_S)),
        bound=st.booleans(),
    )
    def prepare(self, length: int, count: int, owner: int, ttl_s: float, bound: bool = True) -> None:
        pages, until_s = -(-length // PAGE_BYTES), self.clock() + ttl_s
        extents = [len(extent) for extent in self.free_extents()]

        slots = self.slots.prepare(length, count, owner, ttl_s, reservation=7, bound=bound)

        assert len(slots) == min(count, sum(extent // pages for extent in extents)), "refused only without room"
        if max(extents) >= count * pages:
            assert [slot.page - slots[0].page for slot in slots] == list(range(0, count * pages, pages))
        for slot in slots:
            taken = set(range(slot.page, slot.page + pages))
            assert taken <= set().union(*self.free_extents()), "pages of a slot, pinned or resting, are not given out"
            assert slot.generation > self.last_generation, "generations never repeat"
            self.last_generation = slot.generation
            self.held.append(Held(slot, slot.page, slot.pages, slot.generation, owner, until_s, WRITING, bound))
            assert (slot.pages, slot.length, slot.reservation, slot.until_s) == (pages, length, 7, until_s)

    @precondition(lambda self: self.held)
    @rule(pick=picks, owner=owners)
    def commit(self, pick: int, owner: int) -> None:
        """Only its writer may commit, and only while the slot is being written."""
        held = self.pick(pick)
        slot = self.slots.writing(held.page, held.generation, owner)
        expected = held.state == WRITING and held.owner == owner and not held.doomed

        assert (slot is held.slot) == expected
        if slot is not None:
            self.slots.commit(slot)
            held.state = COMMITTED

    @rule(owner=owners)
    def drop_owner(self, owner: int) -> None:
        """A connection closed: what it was writing is free, or will be when a transfer lets go of it."""
        expected = [held for held in self.held if held.state == WRITING and held.owner == owner and not held.doomed]
        abandoned = [held for held in self.held if held.until_s == math.inf and held.owner == owner]

        dropped = self.slots.drop_owner(owner)

        assert {id(slot) for slot in dropped} == {id(held.slot) for held in expected}
        for held in expected + abandoned:
            self.release(held)

    # The directory

    @precondition(lambda self: self.held)
    @rule(pick=picks, rest=st.booleans())
    def free(self, pick: int, rest: bool) -> None:
        held = self.pick(pick)
        expected = held.state != RESTING and not held.doomed

        assert self.slots.free(held.page, held.generation, rest=rest) == expected
        if expected and rest:
            self.rest(held)
        elif expected:
            self.release(held)

    @precondition(lambda self: self.gone)
    @rule(pick=picks, owner=owners, later=st.integers(0, 2))
    def name_what_is_gone(self, pick: int, owner: int, later: int) -> None:
        """Late orders, reads and commits change nothing, whoever has the pages now."""
        page, generation = self.gone[pick % len(self.gone)]
        generation += later * (1 << 40)

        assert not self.slots.free(page, generation)
        assert self.slots.pin(page, generation) is None
        assert self.slots.writing(page, generation, owner) is None

    # Readers, and receivers of written bytes

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def pin(self, pick: int) -> None:
        held = self.pick(pick)
        expected = held.state == COMMITTED and not held.doomed

        assert (self.slots.pin(held.page, held.generation) is held.slot) == expected
        held.pins += expected

    @precondition(lambda self: any(held.state == WRITING for held in self.held))
    @rule(pick=picks)
    def begin_receive(self, pick: int) -> None:
        """As the node's store does: bytes that arrive keep their slot in place."""
        writing = [held for held in self.held if held.state == WRITING]
        held = writing[pick % len(writing)]
        slot = self.slots.writing(held.page, held.generation, held.owner)
        if slot is not None:
            slot.pins += 1
            held.pins += 1

    @precondition(lambda self: any(held.pins for held in self.held))
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        pinned = [held for held in self.held if held.pins]
        self.unpin_one(pinned[pick % len(pinned)])

    @precondition(lambda self: self.held)
    @rule(pick=picks, good=st.booleans())
    def check(self, pick: int, good: bool) -> None:
        """As the scrub does: a slot that is committed, or rests, is pinned, and retired if its bytes are bad."""
        held = self.pick(pick)
        rests = held.state == RESTING and held.until_s < math.inf
        expected = (held.state == COMMITTED or rests) and not held.doomed

        slot = self.slots.pin(*held.name) or self.slots.pin_resting(*held.name)

        assert (slot is held.slot) == expected
        if slot is None:
            return
        held.pins += 1
        if not good:
            assert self.slots.retire(slot)
            assert not self.slots.retire(slot), "and once only"
            self.retire_one(held)
        self.unpin_one(held)

    @precondition(lambda self: any(held.pins and held.state == COMMITTED for held in self.held))
    @rule(pick=picks)
    def retire_under_readers(self, pick: int) -> None:
        """Freed meanwhile or not, the pages stay, and the readers' pins end as ever."""
        pinned = [held for held in self.held if held.pins and held.state == COMMITTED]
        held = pinned[pick % len(pinned)]

        assert self.slots.retire(held.slot)
        self.retire_one(held)

    # Time and restarts

    @rule(seconds=st.sampled_from((0.0, 1.0, 5.0, TTL_MAX_S, QUARANTINE_S)))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        now_s = self.clock()
        overdue = [h for h in self.held if h.state == WRITING and not h.doomed and h.until_s <= now_s]
        rested = [held for held in self.held if held.state == RESTING and held.until_s <= now_s]

        expired = self.slots.expire()

        assert {id(slot) for slot in expired} == {id(held.slot) for held in overdue}
        for held in rested:
            self.release(held)
        for held in overdue:
            self.rest(held)

    @initialize(committed=st.integers(0, 3))
    def used_before(self, committed: int) -> None:
        if committed:
            self.prepare(2 * PAGE_BYTES, committed, 1, TTL_MAX_S)
        for i in range(committed):
            self.commit(i, 1)

    @rule()
    def restart(self) -> None:
        """Adopt what the header file describes: half-written slots rest, since their writers may have them mapped."""
        described = [held for held in self.held if held.state != RESTING and not held.doomed]
        self.gone += [held.name for held in self.held if held not in described]
        self.slots = Slots(PAGES, self.clock, self.slots.next_generation, QUARANTINE_S)
        self.held = described
        for held in described:
            committed = held.state == COMMITTED
            held.slot = self.slots.adopt(held.page, held.slot.length, held.generation, committed=committed)
            held.owner = held.pins = 0
            held.bound = False
            assert held.slot is not None
            if not committed:
                self.rest(held)

    @precondition(lambda self: self.held)
    @rule(pick=picks, pages=st.integers(1, 4), before=st.integers(0, 3))
    def adopt_what_overlaps(self, pick: int, pages: int, before: int) -> None:
        """A header that contradicts another is not adopted."""
        held = self.pick(pick)
        start = max(0, held.page - before)
        reaching = max(pages, held.page - start + 1)

        assert self.slots.adopt(start, reaching * PAGE_BYTES, 1, committed=True) is None

    # What always holds

    @invariant()
    def slots_and_free_extents_cover_the_segment(self) -> None:
        self.slots.check_integrity()
        given = [page for held in self.held for page in range(held.page, held.page + held.pages)]
        assert len(given) == len(set(given)), "no page is in two slots"
        assert self.slots.used_bytes == len(given) * PAGE_BYTES
        assert self.slots.largest_free_bytes == max(map(len, self.free_extents()), default=0) * PAGE_BYTES

    @invariant()
    def every_slot_is_as_the_oracle_says(self) -> None:
        assert {id(slot) for slot in self.slots} == {id(held.slot) for held in self.held}
        for held in self.held:
            slot = held.slot
            assert (slot.page, slot.pages, slot.generation) == (held.page, held.pages, held.generation)
            assert (slot.state, slot.pins, slot.doomed) == (held.state, held.pins, held.doomed)
        resting = sum(held.pages for held in self.held if held.state == RESTING)
        assert self.slots.quarantined_bytes == resting * PAGE_BYTES
        assert self.slots.retired_bytes == sum(held.pages for held in self.held if held.retired) * PAGE_BYTES
        committed = [h.page for h in self.held if h.state == COMMITTED and not h.doomed]
        assert [slot.page for slot in self.slots.committed_in(range(PAGES))] == sorted(committed)

    def teardown(self) -> None:
        """All transfers end, and time passes: every abandoned write has come back."""
        pinned = [held for held in self.held for _ in range(held.pins)]
        for held in pinned:
            self.unpin_one(held)
        for seconds in (TTL_MAX_S, QUARANTINE_S):
            self.clock.advance(seconds)
            self.expire()
        for owner in range(1, 4):
            self.drop_owner(owner)
        retired = {held.page for held in self.held if held.retired}
        assert all(slot.state == COMMITTED or slot.page in retired for slot in self.slots)
        self.slots.check_integrity()

    # The oracle

    def pick(self, pick: int) -> Held:
        return self.held[pick % len(self.held)]

    def free_extents(self) -> list[set[int]]:
        """Runs of pages that no slot has."""
        extents, start = [], 0
        for held in sorted(self.held, key=lambda held: held.page):
            extents.append(set(range(start, held.page)))
            start = held.page + held.pages
        return [*extents, set(range(start, PAGES))]

    def release(self, held: Held) -> None:
        if held.pins:
            held.doomed = True
        else:
            self.held.remove(held)
            self.gone.append(held.name)

    def rest(self, held: Held) -> None:
        """Not given out for a while; one whose writer may still write it, not before that one has gone."""
        while_it_lives = held.bound and held.state == WRITING
        held.state, held.until_s = RESTING, math.inf if while_it_lives else self.clock() + QUARANTINE_S

    def retire_one(self, held: Held) -> None:
        held.state, held.until_s, held.owner, held.doomed, held.retired = RESTING, math.inf, 0, False, True

    def unpin_one(self, held: Held) -> None:
        assert self.slots.pinned(held.page, held.generation) is held.slot
        self.slots.unpin(held.slot)
        held.pins -= 1
        if held.doomed and not held.pins:
            self.release(held)


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(deadline=None)


def make_slots(pages: int = PAGES) -> tuple[Slots, ManualClock]:
    clock = ManualClock()
    return Slots(pages, clock, quarantine_s=QUARANTINE_S), clock


def test_pages_of_a_pinned_slot_are_given_out_after_the_last_unpin_only():
    slots, _ = make_slots(1)
    [slot] = slots.prepare(1, 1, 1, 5.0)
    slots.commit(slot)
    slots.pin(slot.page, slot.generation)
    slots.pin(slot.page, slot.generation)

    assert slots.free(slot.page, slot.generation)
    assert slots.prepare(1, 1, 1, 5.0) == []

    slots.unpin(slot)
    assert slots.prepare(1, 1, 1, 5.0) == []
    slots.unpin(slot)
    assert [again.generation for again in slots.prepare(1, 1, 1, 5.0)] == [slot.generation + 1]


def test_a_second_order_does_not_shorten_or_lengthen_what_the_first_one_began():
    slots, clock = make_slots()
    [slot] = slots.prepare(1, 1, 1, 5.0)
    slots.commit(slot)
    slots.pin(slot.page, slot.generation)

    assert slots.free(slot.page, slot.generation, rest=True)
    assert not slots.free(slot.page, slot.generation)
    slots.unpin(slot)
    assert len(slots) == 1
    clock.advance(QUARANTINE_S)
    slots.expire()
    assert len(slots) == 0


@pytest.mark.parametrize("page", [PAGES, PAGES - 1, PAGES + 5])
def test_a_slot_beyond_the_segment_is_not_adopted(page):
    slots, _ = make_slots()

    assert slots.adopt(page, PAGE_BYTES + 1, 1, committed=True) is None
    slots.check_integrity()


def test_generations_go_on_above_those_adopted():
    slots, _ = make_slots()
    slots.adopt(3, 1, 77, committed=True)
    slots.adopt(5, 1, 12, committed=True)

    assert [slot.generation for slot in slots.prepare(1, 2, 1, 5.0)] == [78, 79]
