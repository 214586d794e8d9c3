"""The tier below memory: which blocks go to disk, when, which come back, and which leave it when it is full."""

import pytest
from fake_node import SHARDED, FakeSegment, SmallPool, chain, make_namespace

from kvpool.core.directory import DISK, Copy, DirectoryConfig, MissReason
from kvpool.core.errors import UsageError
from kvpool.core.limits import PAGE_BYTES

FULL = DirectoryConfig(demote_fill=0.5)
A, B, C = chain(1, 2, 3), chain(4, 5, 6), chain(7, 8, 9)


def tiered(*pages: int, disk_pages: int = 8, config: DirectoryConfig = FULL, **options) -> SmallPool:
    """Nodes with memory of so many pages, each with a disk."""
    pool = SmallPool(*pages, config=config, **options)
    for i in range(len(pages)):
        disk = FakeSegment(bytes([100 + i]) * 16, f"node-{i}", disk_pages * PAGE_BYTES, DISK)
        pool.join(disk)
        pool.segments.append(disk)
    return pool


def read(pool: SmallPool, hashes: list[bytes], namespace=None) -> set[str]:
    """Locate a chain; the media that its blocks can be read from."""
    pool.clock.advance(1.0)
    found = pool.directory.locate((namespace or pool.namespace).id, b"".join(hashes))
    return {pool.directory.segment(number).medium for number in found.segment}


def media(pool: SmallPool, block_hash: bytes) -> list[str]:
    """Where a block is held, as its nodes see it."""
    return sorted(s.medium for s in pool.segments for slot in s.held.values() if slot.hash == block_hash)


def open_copies(pool: SmallPool) -> list[Copy]:
    """Each once, though two segments are of one node."""
    return list({copy.number: copy for copy in pool.copies()}.values())


def move(pool: SmallPool) -> list[list[bytes]]:
    """Let nodes copy all that is to be copied; the hashes of each copy."""
    moved = []
    while pool.directory.move_tiers(30.0):
        for copy in open_copies(pool):
            moved.append(list(copy.rows))
            pool.fetch(copy)
    pool.obey()
    pool.directory.check_integrity()
    return moved


def test_what_was_read_goes_to_disk_with_its_chain_and_what_was_not_read_does_not():
    pool = tiered(6)
    pool.store(A)
    pool.store(B)
    read(pool, A)

    assert move(pool) == [A]
    assert [media(pool, h) for h in A] == [[DISK, "shm"]] * 3
    assert [media(pool, h) for h in B] == [["shm"]] * 3
    assert move(pool) == [], "once"


def test_ancestors_go_first_though_they_were_not_read():
    pool = tiered(6)
    pool.store(A)
    pool.store(B)
    pool.directory.locate(pool.namespace.id, b"".join(A), 2)  # an engine that has the first two itself

    assert move(pool) == [A]


def test_nothing_goes_to_disk_while_memory_has_room():
    pool = tiered(12)
    pool.store(A)
    read(pool, A)
    assert move(pool) == []

    pool.store(B)

    assert move(pool) == [A]


def test_the_copy_in_memory_goes_before_a_leaf_used_later_and_without_loss():
    pool = tiered(6)
    pool.store(A)
    read(pool, A)
    pool.clock.advance(1.0)
    pool.store(B)
    move(pool)

    pool.store(C)
    pool.obey()

    assert [media(pool, h) for h in A] == [[DISK]] * 3
    assert all(pool.visible(A) + pool.visible(B) + pool.visible(C))
    assert pool.directory.stats().evicted_blocks == 0


def test_the_copy_in_memory_stays_when_it_is_read_more_than_what_nobody_reads():
    pool = tiered(6)
    pool.store(A)
    pool.store(B)
    read(pool, A)
    move(pool)
    read(pool, A)

    pool.store(C)
    pool.obey()

    assert [media(pool, h) for h in A] == [[DISK, "shm"]] * 3
    assert pool.visible(B) == [False] * 3


def test_a_read_from_disk_brings_blocks_back_and_the_next_one_is_from_memory():
    pool = on_disk_alone()

    assert read(pool, A) == {DISK}
    assert move(pool) == [A]

    assert read(pool, A) == {DISK, "shm"}
    assert pool.directory.stats().promoted_blocks == 3
    assert move(pool) == []


def test_what_comes_back_takes_no_last_copy_of_what_was_read():
    pool = on_disk_alone()
    disk = pool.segments[1]
    for block_hash in B + C:  # both were read, and the disk has failed to take them
        row = pool.directory._state.chains.indexes[0][block_hash]
        pool.directory._state.blocks.reused[row] = 1

    assert read(pool, A) == {DISK}
    assert move(pool) == []

    assert all(pool.visible(B) + pool.visible(C))
    assert len(disk.held) == 3


def test_a_block_that_failed_to_reach_the_disk_is_tried_again_at_its_next_read():
    pool = tiered(6)
    pool.store(A)
    pool.store(B)
    read(pool, A)
    pool.directory.move_tiers(30.0)
    [copy] = open_copies(pool)
    assert pool.directory.abort(copy.number) == 3
    pool.obey()
    assert move(pool) == []

    read(pool, A)

    assert move(pool) == [A]


def test_a_full_disk_lets_its_oldest_leaves_go():
    pool = tiered(9, disk_pages=5)
    for hashes in (A, B):
        pool.store(hashes)
        read(pool, hashes)
    pool.store(C)
    move(pool)

    assert [media(pool, h) for h in B] == [[DISK, "shm"]] * 3
    assert [media(pool, h) for h in A] == [[DISK, "shm"], [DISK, "shm"], ["shm"]], "memory keeps it"
    assert all(pool.visible(A))


def test_a_full_disk_evicts_what_is_there_alone():
    pool = on_disk_alone(disk_pages=4)

    read(pool, B)
    move(pool)

    assert pool.visible(A) == [True, False, False]
    assert pool.directory.explain(pool.namespace.id, A[1]) == MissReason.EVICTED
    assert [media(pool, h) for h in B] == [[DISK, "shm"]] * 3


def test_leased_blocks_stay_on_a_full_disk():
    pool = on_disk_alone(disk_pages=4)
    pool.directory.match(pool.namespace.id, b"".join(A), 0, 20.0)

    read(pool, B)
    move(pool)

    assert all(pool.visible(A))


def test_new_blocks_are_never_placed_on_disk():
    pool = on_disk_alone()
    below = chain(1, 2, 3, 10, 11)

    result = pool.reserve(below, first=3)

    assert {number for number, _ in result.shares} == {pool.segments[0].number}


def test_a_lost_disk_costs_what_is_there_alone():
    pool = on_disk_alone()
    read(pool, B)
    move(pool)

    pool.lose(pool.segments[1].segment_id)

    assert pool.visible(A) == [False] * 3
    assert all(pool.visible(B))
    assert pool.directory.stats().disk_capacity_bytes == 0
    read(pool, B)
    assert move(pool) == []


def test_a_lost_memory_leaves_what_is_on_disk_visible():
    pool = on_disk_alone()
    pool.lose(pool.segments[0].segment_id)

    assert all(pool.visible(A))


@pytest.mark.parametrize("disk_first", [True, False])
def test_announced_tiers_are_as_they_were(disk_first):
    pool = tiered(6)
    pool.store(A)
    pool.store(B)
    read(pool, A)
    move(pool)
    memory, disk = pool.segments
    pool.lose(memory.segment_id)
    pool.lose(disk.segment_id)
    for segment in (memory, disk):
        pool.join(segment)
    for segment in (disk, memory) if disk_first else (memory, disk):
        assert all(pool.announce(segment, list(segment.held.values())))

    pool.directory.check_integrity()
    assert all(pool.visible(A) + pool.visible(B))
    assert pool.directory.segment(memory.number).surplus_blocks == 3


def test_all_shards_of_a_block_go_and_come():
    pool = tiered(8, namespaces=(SHARDED, make_namespace(model="other")))
    pool.store(A)
    read(pool, A)
    assert len(move(pool)) == 2
    assert [media(pool, h) for h in A] == [[DISK, DISK, "shm", "shm"]] * 3
    other = pool.namespaces[1]
    pool.store(chain(20, 21, 22, 23, 24, 25, 26, 27), other)
    pool.obey()
    assert read(pool, A) == {DISK}

    assert len(move(pool)) == 2

    assert [media(pool, h) for h in A] == [[DISK, DISK, "shm", "shm"]] * 3


def test_a_chain_over_two_nodes_goes_to_the_disks_of_both():
    pool = tiered(3, 3)
    hashes = chain(1, 2, 3, 4, 5)
    pool.store(hashes)
    assert all(segment.held for segment in pool.segments[:2])
    read(pool, hashes)

    move(pool)

    assert [media(pool, h) for h in hashes] == [[DISK, "shm"]] * 5


def test_a_block_whose_ancestor_has_no_disk_to_go_to_stays_in_memory():
    pool = SmallPool(3, 3, config=FULL)
    disk = FakeSegment(b"d" * 16, "node-1", 8 * PAGE_BYTES, DISK)
    pool.join(disk)
    pool.segments.append(disk)
    hashes = chain(1, 2, 3, 4, 5)
    pool.store(hashes)
    assert pool.slot_of(hashes[0])[0] is pool.segments[0]
    assert any(slot.hash in hashes for slot in pool.segments[1].held.values())

    read(pool, hashes)

    assert move(pool) == []


def test_a_node_has_one_disk():
    pool = tiered(3)
    with pytest.raises(UsageError, match="has a disk segment already"):
        pool.directory.add_segment(b"another disk, 16", "node-0", PAGE_BYTES, DISK)


def on_disk_alone(disk_pages: int = 8) -> SmallPool:
    """A pool of six pages that holds B and C in memory, and A on disk only."""
    pool = tiered(6, disk_pages=disk_pages)
    pool.store(A)
    read(pool, A)
    pool.clock.advance(1.0)
    pool.store(B)
    move(pool)
    pool.store(C)
    pool.obey()
    assert [media(pool, h) for h in A] == [[DISK]] * 3
    return pool
