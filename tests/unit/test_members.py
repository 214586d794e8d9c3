"""Members of the pool: one session a node at a time, and silence is found out."""

import itertools

import pytest

from kvpool.core.members import Members, MemberSegment, MemberState
from kvpool.testing import ManualClock

SEGMENT = MemberSegment(b"s" * 16, "shm", 4096)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def members(clock):
    numbers = itertools.count(2, 2)
    return Members(clock, lambda count: next(numbers).to_bytes(count, "little"), ttl_s=10.0)


def join(members, node_id="n0", incarnation=1):
    return members.join(node_id, incarnation, ("tcp://127.0.0.1:1",), (SEGMENT,))


def test_a_node_that_joins_has_a_session_and_a_key_of_its_own(members):
    first, second = join(members, "n0"), join(members, "n1")

    assert first.session != second.session
    assert first.key != second.key
    assert len(first.key) == 32
    assert (first.state, first.segments, first.numbers) == (MemberState.JOINING, (SEGMENT,), [])
    assert [first, second] == list(members)


def test_sessions_fit_a_signed_integer_of_8_bytes(clock):
    members = Members(clock, lambda count: b"\xff" * count, ttl_s=10.0)

    assert join(members).session == (1 << 63) - 1


def test_a_newer_session_of_a_node_ends_the_older_one(members):
    old = join(members)
    new = join(members, incarnation=2)

    assert members.of_session(old.session) is None
    assert members.of_session(new.session) is new
    assert members.get("n0") is new
    assert [new] == list(members)


def test_the_session_of_a_lost_node_is_over(members):
    member = join(members)
    members.set_state(member, MemberState.LOST)

    assert members.of_session(member.session) is None
    assert members.get("n0") is member


def test_the_version_moves_with_every_change_and_only_then(members):
    versions = [members.version]
    member = join(members)
    versions.append(members.version)
    members.set_state(member, MemberState.READY)
    versions.append(members.version)
    members.set_state(member, MemberState.READY)
    members.heard(member)

    assert versions == sorted(set(versions))
    assert members.version == versions[-1]


def test_a_node_is_silent_after_its_time_and_heard_of_again(members, clock):
    member, other = join(members, "n0"), join(members, "n1")
    clock.advance(10.0)
    assert members.silent() == []

    members.heard(other)
    clock.advance(0.1)
    assert members.silent() == [member]

    members.heard(member)
    assert members.silent() == []


def test_a_lost_node_is_not_silent_again(members, clock):
    member = join(members)
    members.set_state(member, MemberState.LOST)
    clock.advance(100.0)

    assert members.silent() == []
