"""Bytes and headers on disk: what is written is there after a restart, and errors are told, slot by slot."""

import errno
import os

import numpy as np
import pytest

from kvpool.core.errors import CapacityError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.node.disk.headers import DiskHeaders
from kvpool.node.headers import PROLOGUE_BYTES, RECORD, SlotHeaders, make_records
from kvpool.node.segment import aligned
from kvpool.node.segment.disk import DiskSegment
from tests.waiting import eventually

SEGMENT_ID = b"d" * 16
PAGES = 64


@pytest.fixture
def segment(tmp_path):
    segment = DiskSegment(tmp_path / "payload", SEGMENT_ID, PAGES * PAGE_BYTES)
    yield segment
    segment.close()


@pytest.fixture
def no_direct_io(monkeypatch):
    """A file system that refuses O_DIRECT."""
    really_open = os.open

    def refuses(path, flags, *others, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *others, **options)

    monkeypatch.setattr("kvpool.node.segment.disk.os.open", refuses)


def filled(pages: int, value: int) -> memoryview:
    memory = aligned(pages * PAGE_BYTES)
    memory[:] = bytes([value]) * len(memory)
    return memory


def extents(*places: tuple[int, int]) -> list[tuple[int, memoryview]]:
    """(page, memory) of slots, given as (page, pages), each with bytes of its own."""
    return [(page, filled(pages, 1 + i)) for i, (page, pages) in enumerate(places)]


def read(segment: DiskSegment, written) -> list[bool]:
    """Whether each slot holds what was written, and no error."""
    wanted = [(page, aligned(len(memory))) for page, memory in written]
    errors = segment.read(wanted)
    return [
        error is None and bytes(found) == bytes(memory)
        for error, (_, found), (_, memory) in zip(errors, wanted, written, strict=True)
    ]


@pytest.mark.parametrize("places", [[(3, 1)], [(0, 2), (2, 2), (4, 1)], [(40, 3), (8, 2), (10, 5), (0, 1)]])
def test_neighbours_and_scattered_slots_are_read_as_they_were_written(segment, places):
    written = extents(*places)

    assert segment.write(written) == [None] * len(places)
    assert read(segment, written) == [True] * len(places)
    assert read(segment, written[::-1]) == [True] * len(places)


def test_a_slot_is_seen_as_long_as_its_block(segment):
    segment.write([(5, filled(2, 9))])

    assert bytes(segment.view(5, PAGE_BYTES + 17)) == b"\x09" * (PAGE_BYTES + 17)


def test_where_direct_io_is_refused_the_page_cache_serves(tmp_path, no_direct_io):
    segment = DiskSegment(tmp_path / "payload", SEGMENT_ID, PAGES * PAGE_BYTES)
    written = extents((0, 2), (7, 1))

    assert not segment.direct
    assert segment.write(written) == [None, None]
    assert read(segment, written) == [True, True]
    assert bytes(segment.view(7, 10)) == b"\x02" * 10
    segment.close()


def test_a_file_cut_short_fails_the_slots_behind_the_cut_and_no_others(segment):
    written = extents((0, 1), (1, 1), (2, 1), (3, 1))
    segment.write(written)
    os.truncate(segment.path, 2 * PAGE_BYTES)

    assert read(segment, written) == [True, True, False, False]
    with pytest.raises(OSError, match="the file is not what it was"):
        segment.view(3, 1)


def test_after_a_restart_the_bytes_are_there(tmp_path, segment):
    written = extents((11, 4))
    segment.write(written)

    again = DiskSegment(tmp_path / "payload", SEGMENT_ID, PAGES * PAGE_BYTES)

    assert read(again, written) == [True]
    again.close()


def test_nobody_maps_it_and_nothing_is_read_once_it_is_closed(tmp_path):
    segment = DiskSegment(tmp_path / "payload", SEGMENT_ID, PAGES * PAGE_BYTES)
    with pytest.raises(UsageError, match="cannot be mapped"):
        segment.descriptors()
    segment.close()
    with pytest.raises(UsageError, match="was closed"):
        segment.view(0, 1)


def test_room_that_cannot_be_had_leaves_no_file(tmp_path):
    with pytest.raises(CapacityError, match="choose a smaller --disk-size"):
        DiskSegment(tmp_path / "payload", SEGMENT_ID, 1 << 60)
    assert not (tmp_path / "payload").exists()


def described(*pages: int) -> SlotHeaders:
    records = make_records(len(pages), length=PAGE_BYTES, generation=np.arange(len(pages)) + 7)
    return SlotHeaders(np.array(pages, np.uint32), records)


def open_headers(path, failures=None) -> DiskHeaders:
    return DiskHeaders(path, SEGMENT_ID, PAGES, (failures if failures is not None else []).append)


def test_headers_are_in_the_file_when_it_is_closed(tmp_path):
    headers = open_headers(tmp_path / "headers")
    headers.write(described(1, 2, 3), SlotState.WRITING)
    headers.commit(np.array([1, 3], np.uint32), np.array([5, 6], np.uint64))
    headers.clear(3)
    generation = headers.next_generation
    headers.close()

    again = open_headers(tmp_path / "headers")

    assert again.scan(SlotState.COMMITTED).named() == [(1, 7)]
    assert again.scan(SlotState.WRITING).named() == [(2, 8)]
    assert again.drop_unsound() == 0
    assert again.next_generation > generation
    again.close()


def test_headers_reach_the_file_by_themselves(tmp_path):
    headers = open_headers(tmp_path / "headers")
    headers.write(described(4), SlotState.COMMITTED)

    def has_reached() -> bool:
        records = np.frombuffer((tmp_path / "headers").read_bytes(), RECORD, offset=PROLOGUE_BYTES)
        return (int(records["state"][4]), int(records["generation"][4])) == (SlotState.COMMITTED, 7)

    eventually(has_reached)
    headers.close()


def test_a_disk_that_takes_no_headers_is_told_once_and_nobody_waits_for_it(tmp_path, monkeypatch):
    failures: list[OSError] = []
    headers = open_headers(tmp_path / "headers", failures)

    def fails(*_) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvpool.node.disk.headers.os.pwrite", fails)
    headers.write(described(4), SlotState.COMMITTED)
    eventually(lambda: failures)
    headers.write(described(5), SlotState.COMMITTED)
    headers.close()

    assert [error.errno for error in failures] == [errno.ENOSPC]
    assert headers.error is failures[0]
