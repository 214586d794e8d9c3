"""Read grants: what a node takes, what it refuses, and for how long; and whose clients may map its memory."""

import dataclasses

import pytest
from real_store import NAMESPACE, SEGMENT_ID

from kvpool.core.errors import ForbiddenError, SettingsError, StaleGrantError
from kvpool.core.grants import Grant, seal
from kvpool.core.read_grants import READ_GRANT_S, ReadGrant, open_read_grant, seal_read_grant
from kvpool.node.guarding import SLACK_S, Guard
from kvpool.node.records import NodeSession
from kvpool.transport.wire.messages import ReadGrants

OTHER = b"o" * 32


@pytest.fixture
def session(node, store, clock):
    """The node's session, begun now on the test's clock."""
    store.read_session = store.session = dataclasses.replace(store.session, began_s=clock())
    node.service.reads.is_on = True
    return store.session


@pytest.fixture
def guard(store, session, clock):
    return Guard(store, needs_grants=True, clock=clock)


def granted(node, namespace=NAMESPACE.id):
    grants = node.service.reads.since(namespace, 0)
    assert isinstance(grants, ReadGrants)
    [only] = grants.nodes
    return only.grant


def test_a_grant_opens_its_namespace_until_it_runs_out(node, guard, clock):
    grant = granted(node)

    assert guard.namespace(grant) == NAMESPACE.id
    clock.advance(READ_GRANT_S + SLACK_S)
    assert guard.namespace(grant) == NAMESPACE.id
    clock.advance(0.01)
    with pytest.raises(StaleGrantError, match="has run out"):
        guard.namespace(grant)
    assert guard.namespace(granted(node)) == NAMESPACE.id
    assert guard.refused == 1


def test_without_a_grant_nothing_is_read(guard):
    with pytest.raises(ForbiddenError, match="read under a read grant"):
        guard.namespace(b"")


def test_a_grant_of_another_session_opens_nothing(node, store, guard, session):
    grant = granted(node)
    assert guard.namespace(grant) == NAMESPACE.id

    store.read_session = NodeSession(session.meta_incarnation, session.session + 1, session.key)
    with pytest.raises(StaleGrantError, match="another session"):
        guard.namespace(grant)
    store.read_session = None
    with pytest.raises(StaleGrantError, match="has not joined"):
        guard.namespace(grant)


def test_reads_go_on_while_the_service_is_out_of_reach(node, store, guard):
    store.session = None

    assert guard.namespace(granted(node)) == NAMESPACE.id


@pytest.mark.parametrize("change", [0, -1], ids=["body", "tag"])
def test_a_changed_grant_opens_nothing(node, guard, change):
    forged = bytearray(granted(node))
    forged[change] ^= 1

    with pytest.raises(StaleGrantError):
        guard.namespace(bytes(forged))


def test_a_write_grant_is_no_read_grant(node, guard):
    _, grant = node.reserve()

    with pytest.raises(StaleGrantError):
        guard.namespace(grant)


@pytest.mark.parametrize("sealed", [b"x", b"x" * 16, b"x" * 4096])
def test_what_is_no_grant_at_all_opens_nothing(guard, sealed):
    with pytest.raises(StaleGrantError):
        guard.namespace(sealed)


def test_a_grant_for_no_namespace_opens_nothing():
    for sealed in (seal_read_grant(ReadGrant(1, 2, b"short", 3), b"k"), seal(Grant(*[0] * 12), b"k")):
        with pytest.raises(StaleGrantError):
            open_read_grant(sealed, b"k")


def test_blocks_of_another_namespace_are_not_there(node, store):
    slots, generations = node.write()

    with store.read(slots, generations, 1, NAMESPACE.id) as found:
        assert found.present == b"\x01"
    with store.read(slots, generations, 1, OTHER) as foreign, store.read(slots, [generations[0] + 1], 1) as gone:
        assert (foreign.present, foreign.views) == (gone.present, gone.views) == (b"\x00", [])
    assert store.stats().counters["foreign_reads"] == 1
    assert node.in_use()[0] == 1, "and none of them is held in place"


@pytest.mark.parametrize(
    ("mapping", "may"), [("all", True), ("off", False), ("tenant:default", True), ("tenant:acme", False)]
)
def test_the_memory_is_mapped_by_those_that_the_setting_names(node, store, session, clock, mapping, may):
    guard = Guard(store, needs_grants=True, mapping=mapping, clock=clock)
    _, write_grant = node.reserve()

    assert guard.may_map(granted(node)) is may
    assert guard.may_map(write_grant) is may, "a writer has no other"
    assert guard.may_map_unasked() is (mapping == "all")


def test_nobody_maps_the_memory_without_a_grant(guard):
    with pytest.raises(ForbiddenError):
        guard.may_map(b"")
    with pytest.raises(StaleGrantError):
        guard.may_map(b"x" * 64)


def test_without_authentication_nothing_is_asked(store):
    guard = Guard(store, needs_grants=False)

    assert (guard.namespace(b""), guard.may_map(b"")) == (None, True)
    assert not Guard(store, needs_grants=False, mapping="off").may_map(b"")
    with pytest.raises(SettingsError, match="without TLS no client is told from another"):
        Guard(store, needs_grants=False, mapping="tenant:acme")


def test_a_namespace_that_nobody_knows_is_no_tenants(node, store, session, clock):
    guard = Guard(store, needs_grants=True, mapping="tenant:default", clock=clock)

    assert not guard.may_map(granted(node, OTHER))
    assert store.segment.segment_id == SEGMENT_ID


def test_grants_are_renewed_before_they_run_out_and_told_once(node, session, clock):
    reads = node.service.reads
    first = reads.since(NAMESPACE.id, 0)

    assert reads.since(NAMESPACE.id, first.version) is None
    clock.advance(READ_GRANT_S / 2)
    second = reads.since(NAMESPACE.id, first.version)
    assert second.version != first.version
    assert second.nodes[0].grant != first.nodes[0].grant
    node.join()
    assert reads.since(NAMESPACE.id, second.version).version != second.version


def test_nobody_is_given_grants_where_none_are_needed(node):
    assert node.service.reads.since(NAMESPACE.id, 0) is None
