"""The node's store over real shared memory, with a real directory behind it: writing, reading, orders and restarts."""

import dataclasses
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.core.checksum import block_seeds, payload_checksum
from kvpool.core.directory import FreeSlot, MissReason, Want
from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ProtocolError, UnavailableError, UnknownNamespaceError, UsageError
from kvpool.core.grants import open_grant, seal
from kvpool.core.keys import chain_hashes
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import MemberSegment
from kvpool.core.namespace import Namespace
from kvpool.core.slots import Slots, SlotState
from kvpool.meta.service import MetaService
from kvpool.node.headers import HeaderFile
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.segment import ShmSegment
from kvpool.node.server import _restore
from kvpool.node.store import NodeSession, NodeStore
from kvpool.ops.settings import MetaSettings
from kvpool.testing import ManualClock
from kvpool.transport.base import WriteStatus

SEGMENT_ID = b"s" * 16
PAGES = 8
NAMESPACE = Namespace(model="demo", block_tokens=1, block_bytes=2 * PAGE_BYTES - 100)
CHAIN = chain_hashes(range(6), 1)
QUARANTINE_S = 30.0
WRITER, OTHER = 1, 2
COMMITTED, STALE, FAILED = WriteStatus.COMMITTED, WriteStatus.STALE, WriteStatus.FAILED


class ServiceLink:
    """The directory of a metadata service in this process, which can be cut off."""

    def __init__(self, service):
        self.service = service
        self.session = 0
        self.cut = False

    def commit(self, segment_id, reservation, headers) -> NDArray[np.uint8]:
        if self.cut:
            raise UnavailableError("cut off")
        columns = (headers.records[name].tolist() for name in ("hash", "shard", "generation", "checksum"))
        hashes, shards, generations, checksums = columns
        written = zip(hashes, shards, headers.pages.tolist(), generations, checksums, strict=True)
        return np.array(self.service.commit(self.session, segment_id, reservation, list(written)), np.uint8)

    def abort(self, reservation, hashes) -> None:
        self.service.abort(reservation, hashes)

    def describe(self, namespace_id) -> bytes:
        return self.service.namespace(namespace_id).document


class Node:
    """A store with its segment, headers and directory, as a node has them."""

    def __init__(self, directory, clock, *, restarted=False):
        self.service = MetaService(MetaSettings(), clock, lambda count: b"\x5a" * count)
        self.service.open_namespace(NAMESPACE.document)
        self.link = ServiceLink(self.service)
        self.segment = ShmSegment(directory / "payload", SEGMENT_ID, PAGES * PAGE_BYTES, "off")
        self.headers = HeaderFile(directory / "headers", SEGMENT_ID, PAGES)
        fresh = Slots(PAGES, clock, self.headers.next_generation, QUARANTINE_S)
        self.slots = _restore(self.headers, PAGES) if restarted else fresh
        book = NamespaceBook(directory / "namespaces", self.link.describe)
        self.store = NodeStore(self.segment, self.headers, self.slots, book, self.link, incarnation=1)
        self.join()

    def join(self):
        segment = MemberSegment(SEGMENT_ID, "shm", PAGES * PAGE_BYTES)
        self.member = self.service.join("n0", 1, (), (segment,))
        self.service.ready(self.member)
        self.link.session = self.member.session
        self.store.session = NodeSession(self.service.incarnation, self.member.session, self.member.key)

    def close(self):
        self.headers.close()
        self.segment.close()

    def reserve(self, blocks=1, first=0):
        """(reservation, sealed grant) for blocks of the chain."""
        packed = b"".join(CHAIN[: first + blocks])
        reserved = self.service.reserve(NAMESPACE.id, packed, first, b"", "writer", 0.0)
        [grant] = reserved.grants
        return reserved.result.reservation, grant.grant

    def fill(self, page, generation, block):
        """Write a block's bytes into its slot, as a writer that maps the segment does; their checksum."""
        payload = bytes([block]) * NAMESPACE.block_bytes
        self.segment.payload[page * PAGE_BYTES :][: len(payload)] = np.frombuffer(payload, np.uint8)
        return checksum_of(payload, CHAIN[block], generation)

    def write(self, blocks=1, first=0, owner=WRITER):
        """Do all that a writer does; (slots, generations)."""
        reservation, grant = self.reserve(blocks, first)
        slots, generations = self.store.prepare(grant, owner)
        named = zip(slots.tolist(), generations.tolist(), strict=True)
        checksums = [self.fill(*name, first + i) for i, name in enumerate(named)]
        statuses = self.seal(reservation, slots, generations, checksums, owner)
        assert statuses == [COMMITTED] * blocks
        return slots.tolist(), generations.tolist()

    def seal(self, reservation, slots, generations, checksums=None, owner=WRITER):
        checksums = np.zeros(len(slots), np.uint64) if checksums is None else np.array(checksums, np.uint64)
        return list(self.store.commit_slots(SEGMENT_ID, reservation, owner, slots, generations, checksums))

    def visible(self):
        return self.service.match(NAMESPACE.id, b"".join(CHAIN), 0, 0.0).blocks

    def in_use(self):
        """(slots, bytes used) of the node, which must agree with its headers."""
        self.slots.check_integrity()
        self.service.check_integrity()
        for state in (SlotState.WRITING, SlotState.COMMITTED):
            described = [(slot.page, slot.generation) for slot in self.slots if slot.state == state and not slot.doomed]
            assert self.headers.scan(state).named() == sorted(described)
        return self.store.stats().slots, self.store.stats().used_bytes


@contextmanager
def no_change(node):
    before = node.in_use()
    yield
    assert node.in_use() == before


def checksum_of(payload, block_hash, generation, shard=0):
    [seed] = block_seeds(NAMESPACE.seed, block_hash, shard, [generation], NAMESPACE.block_bytes)
    return payload_checksum(payload, seed)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def node(tmp_path, clock):
    node = Node(tmp_path, clock)
    yield node
    node.close()


@pytest.fixture
def store(node):
    return node.store


# Writing


def test_a_block_is_visible_once_its_bytes_are_sealed(node, store):
    reservation, grant = node.reserve(blocks=2)
    slots, generations = store.prepare(grant, WRITER)
    assert node.visible() == 0

    named = list(zip(slots.tolist(), generations.tolist(), strict=True))
    checksums = [node.fill(*name, block) for block, name in enumerate(named)]

    assert node.seal(reservation, slots, generations, checksums) == [COMMITTED, COMMITTED]
    assert node.visible() == 2
    located = node.service.locate(NAMESPACE.id, b"".join(CHAIN[:2]), 0, None)
    assert located.slot.tolist() == slots.tolist()
    assert located.generation.tolist() == generations.tolist()
    assert located.checksum.tolist() == checksums
    assert node.in_use() == (2, 4 * PAGE_BYTES)


def test_victims_of_a_grant_are_freed_first(node, store):
    slots, generations = node.write(blocks=4)
    [granted] = node.service.reserve(NAMESPACE.id, b"x" * 32, 0, b"", "writer", 0.0).grants
    assert open_grant(granted.grant, node.member.key).victims() == [(slots[3], generations[3])]

    prepared, _ = store.prepare(granted.grant, WRITER)

    assert prepared.tolist() == [slots[3]]
    assert node.visible() == 3


def test_a_grant_that_finds_no_room_gets_no_slot_and_seals_as_such(node, store):
    reservation, grant = node.reserve(blocks=4)
    store.prepare(grant, OTHER)

    slots, generations = store.prepare(grant, WRITER)

    assert slots.tolist() == [NO_SLOT] * 4
    assert node.seal(reservation, slots, generations) == [WriteStatus.NO_SLOT] * 4
    assert store.stats().counters["no_slot"] == 4


@pytest.mark.parametrize(
    "change", [{"owner": OTHER}, {"reservation": 999}, {"generation": 999}, {"slot": 1}, {"slot": NO_SLOT - 1}], ids=str
)
def test_only_what_the_writer_was_given_can_be_sealed(node, store, change):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    named = {"slot": slots[0], "generation": generations[0], "owner": WRITER, "reservation": reservation} | change

    with no_change(node):
        slot, generation = np.array([named["slot"]], np.uint32), np.array([named["generation"]], np.uint64)
        assert node.seal(named["reservation"], slot, generation, owner=named["owner"]) == [STALE]
    assert node.visible() == 0
    assert node.seal(reservation, slots, generations) == [COMMITTED]


def test_a_slot_is_sealed_once(node, store):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    twice = np.repeat(slots, 2), np.repeat(generations, 2)

    assert node.seal(reservation, *twice) == [COMMITTED, STALE]
    assert node.seal(reservation, slots, generations) == [STALE]
    assert node.in_use() == (1, 2 * PAGE_BYTES)


def test_what_the_directory_has_given_up_is_freed_at_once(node, store):
    reservation, grant = node.reserve(blocks=2)
    slots, generations = store.prepare(grant, WRITER)
    node.service.abort(reservation, [CHAIN[1]])

    assert node.seal(reservation, slots, generations) == [COMMITTED, STALE]
    assert node.in_use() == (1, 2 * PAGE_BYTES)


def test_what_cannot_be_committed_is_freed(node, store):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    node.link.cut = True

    assert node.seal(reservation, slots, generations) == [FAILED]
    assert node.in_use() == (0, 0)
    assert store.stats().counters["commits_failed"] == 1


# Grants


def changed(node, grant, **change):
    """The grant with other fields, sealed as the service would."""
    return seal(msgspec.structs.replace(open_grant(grant, node.member.key), **change), node.member.key)


@pytest.mark.parametrize("change", [{"session": 1}, {"incarnation": 1}], ids=str)
def test_a_grant_of_another_session_is_refused(node, store, change):
    _, grant = node.reserve()

    with no_change(node), pytest.raises(ProtocolError, match="another session; reserve again"):
        store.prepare(changed(node, grant, **change), WRITER)


def test_a_grant_sealed_with_another_key_is_refused(node, store):
    _, grant = node.reserve()
    store.session = dataclasses.replace(store.session, key=b"k" * 32)

    with no_change(node), pytest.raises(ProtocolError, match="current session; reserve again"):
        store.prepare(grant, WRITER)


def test_a_grant_for_another_segment_is_refused(node, store):
    _, grant = node.reserve()

    with no_change(node), pytest.raises(UsageError, match="not of this node"):
        store.prepare(changed(node, grant, segment_id=b"x" * 16), WRITER)


def test_a_node_without_its_service_or_one_that_drains_takes_no_writes(node, store):
    _, grant = node.reserve()
    session, store.session = store.session, None
    with pytest.raises(UnavailableError, match="takes no writes now"):
        store.prepare(grant, WRITER)

    store.session, store.draining = session, True
    with pytest.raises(UnavailableError, match="takes no writes now"):
        store.prepare(grant, WRITER)


def test_a_namespace_nobody_can_describe_takes_no_slot(node, store):
    _, grant = node.reserve()

    with no_change(node), pytest.raises(UnknownNamespaceError):
        store.prepare(changed(node, grant, namespace=b"?" * 32), WRITER)


@pytest.mark.parametrize("ttl_ms", [0, -1, 1 << 60])
def test_a_grant_of_any_duration_ends(node, store, clock, ttl_ms):
    _, grant = node.reserve()
    store.prepare(changed(node, grant, ttl_ms=ttl_ms), WRITER)

    for seconds in (600.0, QUARANTINE_S):
        clock.advance(seconds)
        store.expire()

    assert node.in_use() == (0, 0)


# Receiving


def receive(store, slots, generations, payload, checksum, owner=WRITER):
    """As the data plane does: the bytes go to their slot, and are checked there."""
    [receiving] = store.begin_receive(slots, generations, owner)
    receiving.view[:] = payload
    sound = payload_checksum(receiving.view, receiving.seed) == checksum
    store.end_receive([(receiving, sound)])
    return sound


@pytest.fixture
def prepared(node, store):
    """(reservation, slots, generations) of one block."""
    reservation, grant = node.reserve()
    return reservation, *store.prepare(grant, WRITER)


def test_received_bytes_are_checked_over_the_slot(node, store, prepared):
    reservation, slots, generations = prepared
    payload = bytes(range(256)) * (NAMESPACE.block_bytes // 256) + bytes(NAMESPACE.block_bytes % 256)
    checksum = checksum_of(payload, CHAIN[0], int(generations[0]))

    assert receive(store, slots, generations, payload, checksum)
    assert node.seal(reservation, slots, generations, [checksum]) == [COMMITTED]
    assert bytes(store.pin(int(slots[0]), int(generations[0]), len(payload))) == payload


def test_wrong_bytes_cost_the_slot(node, store, prepared):
    reservation, slots, generations = prepared
    payload = bytes(NAMESPACE.block_bytes)
    checksum = checksum_of(payload, CHAIN[0], int(generations[0]))

    assert not receive(store, slots, generations, payload[:-1] + b"\1", checksum)
    assert node.in_use() == (0, 0)
    assert node.seal(reservation, slots, generations, [checksum]) == [STALE]
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
    node.seal(reservation, slots, generations)
    assert store.begin_receive(slots, generations, WRITER) == [None]


def test_pages_are_not_reused_while_bytes_still_arrive(node, store, prepared):
    """The writer is given up while its bytes arrive: the slot goes when they have, and is not committed."""
    reservation, slots, generations = prepared
    [receiving] = store.begin_receive(slots, generations, WRITER)
    store.drop_owner(WRITER)
    assert store.stats().used_bytes == 2 * PAGE_BYTES

    store.end_receive([(receiving, True)])
    assert node.in_use() == (0, 0)
    assert node.seal(reservation, slots, generations) == [STALE]


def test_a_slot_named_twice_in_one_request_is_received_twice_and_let_go_twice(node, store, prepared):
    _, slots, generations = prepared
    twice = store.begin_receive(np.repeat(slots, 2), np.repeat(generations, 2), WRITER)

    store.end_receive([(twice[0], False), (twice[1], True)])

    assert node.in_use() == (0, 0)


# Giving up


def test_a_writer_that_goes_gives_back_slots_and_reservations(node, store):
    _, grant = node.reserve(blocks=2)
    store.prepare(grant, WRITER)
    assert node.service.reserve(NAMESPACE.id, CHAIN[0], 0, b"", "other", 0.0).result.wants == bytes([Want.IN_FLIGHT])

    store.drop_owner(WRITER)

    assert node.in_use() == (0, 0)
    assert node.reserve(blocks=2)[0]


def test_a_writer_that_goes_takes_nothing_committed_and_nothing_of_others(node, store):
    node.write()
    store.prepare(node.reserve(first=1)[1], OTHER)

    with no_change(node):
        store.drop_owner(WRITER)
    assert node.visible() == 1


def test_a_writer_can_discard_its_own_slots_only(node, store):
    reservation, grant = node.reserve(blocks=2)
    slots, generations = store.prepare(grant, WRITER)
    named = slots.tolist(), generations.tolist()

    assert store.discard(*named, OTHER) == 0
    assert store.discard(*named, WRITER) == 2
    assert store.discard(*named, WRITER) == 0
    assert node.seal(reservation, slots, generations) == [STALE, STALE]
    assert node.in_use() == (0, 0)


def test_a_write_past_its_deadline_rests_and_is_returned(node, store, clock):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    clock.advance(30.0)
    store.expire()

    assert node.in_use() == (1, 2 * PAGE_BYTES)
    assert store.stats().quarantined_bytes == 2 * PAGE_BYTES
    assert node.seal(reservation, slots, generations) == [STALE]
    assert store.stats().counters["expired_writes"] == 1

    clock.advance(QUARANTINE_S)
    store.expire()
    assert node.in_use() == (0, 0)


# Reading


def test_only_committed_slots_of_that_generation_are_read(node, store, prepared):
    reservation, slots, generations = prepared
    slot, generation = int(slots[0]), int(generations[0])
    assert store.pin(slot, generation, 10) is None

    node.seal(reservation, slots, generations)

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


# Orders and restarts


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
    node.service.report_bad(NAMESPACE.id, CHAIN[0], node.member.numbers[0], slot, generation)

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
