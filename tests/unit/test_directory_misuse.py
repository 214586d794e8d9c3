"""Calls that cannot be right: the directory refuses them, says why, and is as before."""

import pytest
from fake_node import chain

from kvpool.core.directory import Inventory, Want
from kvpool.core.errors import InvalidHashError, NamespaceMismatchError, UnknownNamespaceError, UsageError
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX, RESERVE_BLOCKS_MAX

WANTED, EXISTS = Want.WANTED, Want.EXISTS


@pytest.mark.parametrize(
    "call",
    [
        lambda directory, ns: directory.match(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.locate(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.reserve(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.explain(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.pin(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.unpin(ns, bytes(HASH_BYTES)),
        lambda directory, ns: directory.announce(bytes(16), ns, Inventory.of([])),
        lambda directory, ns: directory.gone(bytes(16), ns, bytes(HASH_BYTES), 0, 1),
        lambda directory, ns: directory.namespace(ns),
    ],
)
def test_an_unknown_namespace_is_refused(pool, call):
    with pytest.raises(UnknownNamespaceError, match="this namespace is not open here"):
        call(pool.directory, b"?" * 32)


@pytest.mark.parametrize("hashes", [b"", bytes(31), bytes(HASH_BYTES + 1), bytes(HASH_BYTES * (MATCH_BLOCKS_MAX + 1))])
@pytest.mark.parametrize("call", ["match", "locate", "reserve"])
def test_hashes_that_cannot_be_a_chain_are_refused(pool, call, hashes):
    with pytest.raises(InvalidHashError):
        getattr(pool.directory, call)(pool.namespace.id, hashes)


@pytest.mark.parametrize("call", ["match", "locate", "reserve"])
@pytest.mark.parametrize("first", [-1, 2])
def test_the_first_block_must_be_one_of_the_chain(pool, call, first):
    with pytest.raises(InvalidHashError, match=f"first is {first}"):
        getattr(pool.directory, call)(pool.namespace.id, b"".join(chain(1, 2)), first)


def test_one_reserve_takes_so_many_blocks_and_no_more(pool):
    hashes = chain(*range(RESERVE_BLOCKS_MAX + 1))

    with pytest.raises(InvalidHashError, match=f"{RESERVE_BLOCKS_MAX} blocks at a time"):
        pool.reserve(hashes)
    assert pool.reserve(hashes, first=1).missing_from == 0


def test_a_hash_that_stands_twice_is_refused(pool):
    with pytest.raises(InvalidHashError, match="twice"):
        pool.reserve(chain(1, 2) + chain(1, 2))
    assert pool.in_use() == (0, 0)


def test_a_block_given_below_another_parent_is_refused_and_nothing_leaks(pool):
    pool.store(chain(1, 2))
    before = pool.in_use()

    with pytest.raises(NamespaceMismatchError, match=r"hashes\[2\] is stored below another parent"):
        pool.reserve([*chain(7, 8), chain(1, 2)[1]])

    assert pool.in_use() == before
    assert pool.visible(chain(7, 8)) == [False, False]
    pool.directory.check_integrity()


def test_a_refused_chain_does_not_hurt_the_next_one(pool):
    pool.store(chain(1, 2))
    with pytest.raises(NamespaceMismatchError):
        pool.reserve([chain(1, 2)[1]])

    pool.store(chain(7, 8))

    assert pool.visible(chain(7, 8)) == [True, True]


def test_a_chain_cannot_be_stored_below_itself(pool):
    """A ring of blocks would have no leaf: nothing could ever evict it."""
    hashes = chain(1, 2, 3)
    pool.store(hashes)
    pool.lose_block(hashes[0])
    before = pool.in_use()

    with pytest.raises(NamespaceMismatchError, match="below the chain"):
        pool.reserve([*chain(8), hashes[0]], parent=hashes[2])

    assert pool.in_use() == before
    assert list(pool.reserve(hashes).wants) == [WANTED, EXISTS, EXISTS]


def test_an_inventory_cannot_close_a_ring(pool):
    segment = pool.segments[0]
    one, two, three = chain(1)[0], chain(2)[0], chain(3)[0]
    slots = [
        segment.store(pool.namespace, one, two, 0),
        segment.store(pool.namespace, two, one, 0),
        segment.store(pool.namespace, three, three, 0),
    ]

    assert pool.announce(segment, slots) == [True, False, False]
    pool.directory.check_integrity()


def test_a_segment_joins_once(pool):
    with pytest.raises(UsageError, match="open already"):
        pool.join(pool.segments[0])


def test_a_segment_has_a_capacity(pool):
    with pytest.raises(UsageError, match="0 bytes"):
        pool.directory.add_segment(b"new" * 5 + b"!", "node-9", 0)
