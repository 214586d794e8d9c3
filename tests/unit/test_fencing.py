"""Who speaks for an ended session or another incarnation is refused; every call that changes something is fenced."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from fake_node import chain, make_namespace
from real_store import STALE, WRITER

from kvpool.core.directory import CommitStatus, Inventory
from kvpool.core.errors import ProtocolError, UnavailableError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.members import MemberSegment, MemberState
from kvpool.meta.framed import MetaSession
from kvpool.meta.moving import DrainState
from kvpool.meta.service import MetaService
from kvpool.node.serving import DataSession
from kvpool.ops.settings import MetaSettings
from kvpool.v1 import admin_pb2, directory_pb2, membership_pb2, store_node_pb2

NAMESPACE = make_namespace()
SEGMENT = MemberSegment(b"s" * 16, "shm", 4 * PAGE_BYTES)
AUDIT = Path(__file__).parents[2] / "docs" / "design" / "recovery.md"


@pytest.fixture
def service(clock):
    service = MetaService(MetaSettings(), clock, np.random.default_rng(1).bytes)
    service.open_namespace(NAMESPACE.document)
    return service


def join(service):
    member = service.join("n0", 1, (), (SEGMENT,))
    service.ready(member)
    return member


def reserve(service, hashes):
    return service.reserve(NAMESPACE.id, b"".join(hashes), 0, b"", "w", 0.0).result.reservation


CALLS = {
    "heartbeat": lambda service, member: service.heard(member, 0),
    "inventory": lambda service, member: service.take_inventory(
        member, SEGMENT.segment_id, NAMESPACE.document, Inventory.of([])
    ),
    "ready": lambda service, member: service.ready(member),
    "draining": lambda service, member: service.draining(member),
    "orders": lambda service, member: service.wait_for_orders(member, 0, 0.0),
    "fetch": lambda service, member: service.fetch(member, 1),
}


@pytest.mark.parametrize("end", ["rejoined", "lost"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_stream_of_an_ended_session_changes_nothing(service, call, end):
    old = join(service)
    if end == "rejoined":
        join(service)
    else:
        service.leave(old)

    with pytest.raises(UnavailableError, match="session of node n0 is over"):
        call(service, old)


def test_the_end_of_an_old_stream_does_not_end_the_new_session(service):
    old = join(service)
    new = join(service)

    service.leave(old)

    assert new.state == MemberState.READY
    assert [segment.segment_id for segment in service._directory.segments()] == [SEGMENT.segment_id]


def test_commits_and_losses_of_an_ended_session_are_refused(service):
    old = join(service)
    reservation = reserve(service, chain(1))
    new = join(service)
    written = [(chain(1)[0], 0, 3, 5, 7)]

    assert service.commit(old.session, SEGMENT.segment_id, reservation, written) == [CommitStatus.STALE]
    again = reserve(service, chain(1))
    assert service.commit(new.session, SEGMENT.segment_id, again, written) == [CommitStatus.COMMITTED]
    named = [(chain(1)[0], 3, 5)]
    assert service.gone(old.session, SEGMENT.segment_id, NAMESPACE.id, named, bad=False) == 0
    assert service.gone(new.session, SEGMENT.segment_id, NAMESPACE.id, named, bad=False) == 1


def test_a_node_cannot_speak_for_a_segment_of_another(service):
    join(service)
    other = service.join("n1", 2, (), (MemberSegment(b"t" * 16, "shm", PAGE_BYTES),))
    reservation = reserve(service, chain(1))
    written = [(chain(1)[0], 0, 3, 5, 7)]
    assert service.commit(other.session, SEGMENT.segment_id, reservation, written) == [CommitStatus.STALE]


def test_a_grant_whose_session_ends_while_it_is_opened_frees_none_of_its_victims(node, store, monkeypatch):
    [slot], [generation] = node.write()
    _, grant = node.reserve(blocks=2)
    monkeypatch.setattr(store.book, "learn", lambda _: node.join())

    with pytest.raises(ProtocolError, match="another session"):
        store.prepare(grant, WRITER)

    assert store.inventory().named() == [(slot, generation)]


def test_an_inventory_leaves_out_what_is_being_committed(node, store):
    reservation, grant = node.reserve()
    slots, generations = store.prepare(grant, WRITER)
    announced = []
    commit = node.link.commit

    def commit_after_a_new_session(*arguments):
        node.join()
        announced.extend(store.inventory().named())
        return commit(*arguments)

    node.link.commit = commit_after_a_new_session

    assert node.commit_slots(reservation, slots, generations) == [STALE]
    assert announced == [], "the commit was refused, so the directory must not know the slot"
    assert node.in_use() == (0, 0)
    node.link.commit = commit
    node.write()
    assert len(store.inventory()) == 1
    assert node.visible() == 1


def test_an_order_to_fetch_is_for_the_session_that_it_was_sent_to(node, store):
    _, grant = node.reserve()
    store.open_grant(grant)
    store.session = dataclasses.replace(store.session, session=store.session.session + 1)

    with pytest.raises(ProtocolError, match="another session"):
        store.open_grant(grant)


def test_a_drain_ends_with_the_session_of_its_node(service):
    member = join(service)
    reserve(service, chain(1))
    service.mover.drain("n0", 60.0, stay=False)

    again = join(service)
    service.tick()

    assert service.mover.progress("n0").state == DrainState.LOST
    assert again.mode == (False, False)
    assert (member.leaves, again.state) == (False, MemberState.READY)


def handled_by(session):
    return {kind.__name__.removesuffix("Request") for kind in session._handlers}


def called_in(*modules):
    services = [service for m in modules for service in m.DESCRIPTOR.services_by_name.values()]
    return {method.name for service in services for method in service.methods}


def test_every_call_stands_in_the_audit():
    """A new call without a fence, or a reason to need none, fails here."""
    text = AUDIT.read_text(encoding="utf-8")
    framed = handled_by(MetaSession(None)) | handled_by(DataSession(None, 1, local=True))
    grpc = called_in(admin_pb2, directory_pb2, membership_pb2, store_node_pb2)
    kinds = membership_pb2.DESCRIPTOR.message_types_by_name
    events = {field.name for kind in ("FromNode", "ToNode") for field in kinds[kind].fields}

    assert sorted(name for name in framed | grpc | events if f"`{name}`" not in text) == []
