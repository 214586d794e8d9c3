"""Writing to a node's store: grants, slots that are prepared and committed, writers that give up."""

import dataclasses

import msgspec
import numpy as np
import pytest
from real_store import CHAIN, COMMITTED, FAILED, NAMESPACE, OTHER, QUARANTINE_S, STALE, WRITER, no_change

from kvpool.core.directory import Want
from kvpool.core.directory.table import NO_SLOT
from kvpool.core.errors import ProtocolError, UnavailableError, UnknownNamespaceError, UsageError
from kvpool.core.grants import open_grant, seal
from kvpool.core.limits import PAGE_BYTES
from kvpool.transport.base import WriteStatus

# Writing


def test_a_block_is_visible_once_its_bytes_are_committed(node, store):
    reservation, grant = node.reserve(blocks=2)
    slots, generations = store.prepare(grant, WRITER)
    assert node.visible() == 0

    named = list(zip(slots.tolist(), generations.tolist(), strict=True))
    checksums = [node.fill(*name, block) for block, name in enumerate(named)]

    assert node.commit_slots(reservation, slots, generations, checksums) == [COMMITTED, COMMITTED]
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


def test_a_grant_that_finds_no_room_gets_no_slot_and_commits_as_such(node, store):
    reservation, grant = node.reserve(blocks=4)
    store.prepare(grant, OTHER)

    slots, generations = store.prepare(grant, WRITER)

    assert slots.tolist() == [NO_SLOT] * 4
    assert node.commit_slots(reservation, slots, generations) == [WriteStatus.NO_SLOT] * 4
    assert store.stats().counters["no_slot"] == 4


@pytest.mark.parametrize(
    "change", [{"owner": OTHER}, {"reservation": 999}, {"generation": 999}, {"slot": 1}, {"slot": NO_SLOT - 1}], ids=str
)
def test_only_what_the_writer_was_given_can_be_committed(node, store, change):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    named = {"slot": slots[0], "generation": generations[0], "owner": WRITER, "reservation": reservation} | change

    with no_change(node):
        slot, generation = np.array([named["slot"]], np.uint32), np.array([named["generation"]], np.uint64)
        assert node.commit_slots(named["reservation"], slot, generation, owner=named["owner"]) == [STALE]
    assert node.visible() == 0
    assert node.commit_slots(reservation, slots, generations) == [COMMITTED]


def test_a_slot_is_committed_once(node, store):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    twice = np.repeat(slots, 2), np.repeat(generations, 2)

    assert node.commit_slots(reservation, *twice) == [COMMITTED, STALE]
    assert node.commit_slots(reservation, slots, generations) == [STALE]
    assert node.in_use() == (1, 2 * PAGE_BYTES)


def test_what_the_directory_has_given_up_is_freed_at_once(node, store):
    reservation, grant = node.reserve(blocks=2)
    slots, generations = store.prepare(grant, WRITER)
    node.service.abort(reservation, [CHAIN[1]])

    assert node.commit_slots(reservation, slots, generations) == [COMMITTED, STALE]
    assert node.in_use() == (1, 2 * PAGE_BYTES)


def test_what_cannot_be_committed_is_freed(node, store):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    node.link.cut = True

    assert node.commit_slots(reservation, slots, generations) == [FAILED]
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
    store.drop_owner(WRITER)

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
    assert node.commit_slots(reservation, slots, generations) == [STALE, STALE]
    assert node.in_use() == (0, 0)


@pytest.mark.parametrize("bound", [True, False])
def test_a_write_past_its_deadline_rests_and_is_returned(node, store, clock, bound):
    """Not while a writer lives that may only be paused, with the slot mapped and half written."""
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER, bound=bound)
    clock.advance(30.0)
    store.expire()

    assert node.in_use() == (1, 2 * PAGE_BYTES)
    assert store.stats().quarantined_bytes == 2 * PAGE_BYTES
    assert store.stats().counters["expired_writes"] == 1

    clock.advance(QUARANTINE_S)
    store.expire()
    assert node.in_use() == ((1, 2 * PAGE_BYTES) if bound else (0, 0))
    assert node.commit_slots(reservation, slots, generations) == [STALE]
    store.drop_owner(WRITER)
    assert node.in_use() == (0, 0)
