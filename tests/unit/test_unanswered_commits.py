"""Commits whose answer never comes, comes late, or comes from a session that is over: what the node keeps and frees."""

import threading
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from framed_peer import LONG_S
from real_store import COMMITTED, FAILED, SEGMENT_ID, STALE, WRITER

from kvpool.core.directory import CommitStatus, FreeSlot
from kvpool.core.errors import UnavailableError
from kvpool.node.control import Control
from kvpool.v1 import common_pb2


def test_a_commit_without_an_answer_frees_the_slots_and_asks_for_a_new_session(node, store, prepared):
    node.link.cut = True

    assert node.commit_slots(*prepared) == [FAILED]

    assert node.in_use() == (0, 0)
    assert store.in_doubt


def test_an_answered_commit_raises_no_doubt(node, store, prepared):
    assert node.commit_slots(*prepared) == [COMMITTED]
    assert not store.in_doubt


class Call:
    def __init__(self):
        self.cancelled = threading.Event()

    def cancel(self):
        self.cancelled.set()


def test_in_doubt_the_control_loop_ends_its_session(store):
    store.in_doubt = True
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        link = SimpleNamespace(channel=channel)
        control = Control("n0", 1, [], store, link, common_pb2.Scrub, copier=None, on_leave=None)
        control._call = Call()
        control._beat(0.001, threading.Event())  # returns: the session is over
    assert control._call.cancelled.is_set()


def answering(node, store, answer):
    """The directory's answer comes when the node's session is another already."""

    def commit(segment_id, reservation, headers):
        store.session = object()
        return answer(headers)

    node.link.commit = commit


@pytest.mark.parametrize("answer", list(CommitStatus))
def test_what_an_outdated_session_answers_keeps_nothing(node, store, prepared, answer):
    """The inventory of the new session has left these slots out."""
    answering(node, store, lambda headers: np.full(len(headers), answer, np.uint8))

    assert node.commit_slots(*prepared) == [STALE]

    assert node.in_use() == (0, 0)
    assert not store.in_doubt


def test_the_silence_of_an_outdated_session_raises_no_doubt(node, store, prepared):
    def fail(headers):
        raise UnavailableError("the old service is gone")

    answering(node, store, fail)

    assert node.commit_slots(*prepared) == [FAILED]

    assert node.in_use() == (0, 0)
    assert not store.in_doubt


def test_a_slot_whose_time_ran_out_is_free_when_its_writer_has_finished(node, store, prepared, clock):
    clock.advance(node.service.settings.reservation_ttl_s)
    store.expire()
    assert store.stats().quarantined_bytes, "its writer may still write"

    assert node.commit_slots(*prepared) == [STALE]

    assert node.in_use() == (0, 0)
    store.drop_owner(WRITER)


def test_only_its_own_writer_can_say_so(node, store, prepared, clock):
    clock.advance(node.service.settings.reservation_ttl_s)
    store.expire()

    assert node.commit_slots(*prepared, owner=WRITER + 1) == [STALE]

    assert store.stats().quarantined_bytes


def test_one_that_is_still_being_received_is_free_after_its_last_byte(node, store, prepared, clock):
    _, slots, generations = prepared
    received = store.begin_receive(slots, generations, WRITER)
    clock.advance(node.service.settings.reservation_ttl_s)
    store.expire()
    node.commit_slots(*prepared)
    assert store.stats().slots == 1, "bytes still arrive there"

    store.end_receive([(receiving, True) for receiving in received])

    assert node.in_use() == (0, 0)


def test_a_page_committed_anew_before_its_first_commit_is_answered_stays_out_of_inventories(node, store):
    """An order frees the first slot, another block takes its page: the first answer must not speak for the second."""
    (reservation, grant), (again, grant_again) = node.reserve(), node.reserve(blocks=1, first=1)
    slots, generations = store.prepare(grant, WRITER)
    first_asked, second_asked, answer_first = threading.Event(), threading.Event(), threading.Event()
    answer_second = threading.Event()

    def commit(segment_id, number, headers):
        asked, answer = (first_asked, answer_first) if number == reservation else (second_asked, answer_second)
        asked.set()
        assert answer.wait(LONG_S)
        return np.full(len(headers), CommitStatus.STALE, np.uint8)

    node.link.commit = commit
    first = threading.Thread(target=node.commit_slots, args=(reservation, slots, generations))
    first.start()
    assert first_asked.wait(LONG_S)
    store.apply([FreeSlot(1, SEGMENT_ID, int(slots[0]), int(generations[0]), rest=False)])
    slots_again, generations_again = store.prepare(grant_again, WRITER)
    assert slots_again.tolist() == slots.tolist(), "the same page"
    second = threading.Thread(target=node.commit_slots, args=(again, slots_again, generations_again))
    second.start()
    assert second_asked.wait(LONG_S)

    answer_first.set()
    first.join()
    named = store.inventory().named()
    answer_second.set()
    second.join()

    assert named == []
    assert node.in_use() == (0, 0)
