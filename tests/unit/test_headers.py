"""Slot headers: what a restart finds in the file is what was written, or nothing."""

from pathlib import Path

import pytest

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.node.headers import GENERATIONS_RESERVED, RECORD_BYTES, HeaderFile, SlotHeader, stored_segment_id

SEGMENT_ID = bytes(range(16))
PAGES = 8
PROLOGUE_BYTES = 64


def slot_header(page, generation=1, length=PAGE_BYTES):
    return SlotHeader(page, 3, length, generation, b"n" * 32, bytes([page]) * 32, b"p" * 32, (1 << 64) - 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "headers"


@pytest.fixture
def headers(path):
    file = HeaderFile(path, SEGMENT_ID, PAGES)
    yield file
    file.close()


def reopened(path, segment_id=SEGMENT_ID, pages=PAGES):
    file = HeaderFile(path, segment_id, pages)
    found, next_generation = list(file.scan()), file.next_generation
    file.close()
    return found, next_generation


def test_a_new_file_describes_nothing(headers, path):
    assert list(headers.scan()) == []
    assert headers.next_generation == 1
    assert path.stat().st_size == PROLOGUE_BYTES + PAGES * RECORD_BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_restart_finds_what_was_written_in_page_order(headers, path):
    writing, committed = slot_header(5, 2), slot_header(1, 7, 3 * PAGE_BYTES)
    headers.write(writing, SlotState.WRITING)
    headers.write(committed, SlotState.COMMITTED)

    assert reopened(path)[0] == [(committed, SlotState.COMMITTED), (writing, SlotState.WRITING)]


def test_a_slot_that_was_freed_is_not_found(headers, path):
    headers.write(slot_header(1), SlotState.COMMITTED)
    headers.write(slot_header(2), SlotState.COMMITTED)
    headers.clear(1)

    assert reopened(path)[0] == [(slot_header(2), SlotState.COMMITTED)]


def test_a_record_takes_the_place_of_the_one_before(headers):
    headers.write(slot_header(1, 1), SlotState.WRITING)
    headers.write(slot_header(1, 2), SlotState.COMMITTED)

    assert list(headers.scan()) == [(slot_header(1, 2), SlotState.COMMITTED)]


def test_a_restart_begins_above_every_generation_given_out(headers, path):
    headers.reserve_generations(5)
    assert reopened(path)[1] > 5

    headers.reserve_generations(3 * GENERATIONS_RESERVED)
    assert reopened(path)[1] > 3 * GENERATIONS_RESERVED


def test_generations_do_not_repeat_over_restarts_that_write_nothing(path):
    seen = [reopened(path)[1] for _ in range(4)]

    assert seen == sorted(set(seen))


def test_a_damaged_record_is_left_out_and_the_others_stay(headers, path):
    for page in range(3):
        headers.write(slot_header(page), SlotState.COMMITTED)
    damaged = PROLOGUE_BYTES + 1 * RECORD_BYTES + 40
    with path.open("r+b") as file:
        file.seek(damaged)
        byte = file.read(1)[0]
        file.seek(damaged)
        file.write(bytes([byte ^ 1]))

    assert [header.page for header, _ in headers.scan()] == [0, 2]


@pytest.mark.parametrize("length", [0, (PAGES - 2) * PAGE_BYTES + 1, (1 << 64) - 1])
def test_a_slot_that_reaches_beyond_the_segment_is_left_out(headers, length):
    headers.write(slot_header(2, length=length), SlotState.COMMITTED)

    assert list(headers.scan()) == []


def test_a_scan_cut_short_does_not_keep_the_file_mapped(path):
    file = HeaderFile(path, SEGMENT_ID, PAGES)
    file.write(slot_header(0), SlotState.COMMITTED)
    next(file.scan())
    assert str(path) in Path("/proc/self/maps").read_text()

    file.close()

    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_tells_its_segment(headers, path):
    assert stored_segment_id(path, PAGES) == SEGMENT_ID


@pytest.mark.parametrize("pages", [0, PAGES - 1, PAGES + 1])
def test_a_file_of_another_size_tells_no_segment(headers, path, pages):
    assert stored_segment_id(path, pages) is None


def test_a_missing_empty_or_foreign_file_tells_no_segment(path):
    assert stored_segment_id(path, PAGES) is None
    path.write_bytes(b"")
    assert stored_segment_id(path, PAGES) is None
    path.write_bytes(bytes(PROLOGUE_BYTES + PAGES * RECORD_BYTES))
    assert stored_segment_id(path, PAGES) is None


@pytest.mark.parametrize(
    ("segment_id", "pages", "shown"),
    [(b"x" * 16, PAGES, "not the header file of this segment"), (SEGMENT_ID, PAGES + 1, "another size")],
)
def test_the_file_of_something_else_is_refused_and_left_as_it_is(headers, path, segment_id, pages, shown):
    headers.write(slot_header(1), SlotState.COMMITTED)
    before = path.read_bytes()

    with pytest.raises(CapacityError, match=f"{shown}; remove it to start empty"):
        HeaderFile(path, segment_id, pages)
    assert path.read_bytes() == before


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 24])
def test_a_damaged_prologue_is_refused(headers, path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xfe")

    assert stored_segment_id(path, PAGES) != SEGMENT_ID
    with pytest.raises(CapacityError, match="not the header file of this segment"):
        HeaderFile(path, SEGMENT_ID, PAGES)


def test_a_link_planted_in_its_place_is_not_followed(path, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.symlink_to(target)

    with pytest.raises(CapacityError, match=str(path)):
        HeaderFile(path, SEGMENT_ID, PAGES)
    assert target.read_bytes() == b"precious"


def test_all_of_the_file_is_allocated_so_that_a_later_write_cannot_find_memory_full(path):
    HeaderFile(path, SEGMENT_ID, 1024).close()

    assert path.stat().st_blocks * 512 >= path.stat().st_size
