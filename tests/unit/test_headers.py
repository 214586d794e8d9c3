"""Slot headers: what a restart finds in the file is what was written, or nothing."""

from pathlib import Path

import numpy as np
import pytest

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.node.headers import (
    GENERATIONS_RESERVED,
    RECORD_BYTES,
    HeaderFile,
    SlotHeaders,
    header_file_bytes,
    make_records,
    stored_segment_id,
)

SEGMENT_ID = bytes(range(16))
PAGES = 8
PROLOGUE_BYTES = 64
FIELDS = ["shard", "length", "generation", "namespace", "hash", "parent", "checksum"]
WRITING, COMMITTED = SlotState.WRITING, SlotState.COMMITTED


def slots_at(*pages, generation=1, length=PAGE_BYTES):
    """Headers of slots that differ in their hashes."""
    records = make_records(
        len(pages),
        shard=3,
        length=length,
        generation=[generation + i for i in range(len(pages))],
        namespace=b"n" * 32,
        hash=b"".join(bytes([page]) * 32 for page in pages),
        parent=bytes(32),
        checksum=(1 << 64) - 1,
    )
    return SlotHeaders(np.array(pages, np.uint32), records)


def rows(headers):
    """Page and fields of each, to compare."""
    return [
        (page, *record) for page, record in zip(headers.pages.tolist(), headers.records[FIELDS].tolist(), strict=True)
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "headers"


@pytest.fixture
def headers(path):
    file = HeaderFile(path, SEGMENT_ID, PAGES)
    yield file
    file.close()


def found_again(path, state):
    file = HeaderFile(path, SEGMENT_ID, PAGES)
    found = file.scan(state)
    file.close()
    return rows(found)


def next_generation(path):
    file = HeaderFile(path, SEGMENT_ID, PAGES)
    file.close()
    return file.next_generation


def test_a_new_file_describes_nothing(headers, path):
    assert [len(headers.scan(state)) for state in SlotState] == [0, 0, 0]
    assert headers.next_generation == 1
    assert path.stat().st_size == PROLOGUE_BYTES + PAGES * RECORD_BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_restart_finds_what_was_written_by_state_in_page_order(headers, path):
    writing, committed = slots_at(5), slots_at(7, 1, 3, generation=9)
    headers.write(writing, WRITING)
    headers.write(committed, COMMITTED)

    assert found_again(path, WRITING) == rows(writing)
    assert found_again(path, COMMITTED) == sorted(rows(committed))


def test_a_slot_is_committed_with_its_payloads_checksum(headers, path):
    headers.write(slots_at(1, 2), WRITING)

    committed = headers.commit(np.array([2], np.uint32), np.array([77], np.uint64))

    assert committed.records["checksum"].tolist() == [77]
    assert found_again(path, COMMITTED) == rows(committed)
    assert found_again(path, WRITING) == rows(slots_at(1))
    assert committed.named() == [(2, 2)]


def test_what_is_selected_keeps_its_page():
    three = slots_at(1, 4, 6)

    assert rows(three.select(slice(1, 3))) == rows(three)[1:]
    assert rows(three.select(np.array([True, False, True]))) == [rows(three)[0], rows(three)[2]]


@pytest.mark.parametrize("cleared", [1, [1], [1, 3]], ids=str)
def test_a_slot_that_was_freed_is_not_found(headers, path, cleared):
    headers.write(slots_at(1, 2, 3), COMMITTED)

    headers.clear(cleared)

    left = {1, 2, 3} - set(np.atleast_1d(cleared).tolist())
    assert {row[0] for row in found_again(path, COMMITTED)} == left


def test_a_record_takes_the_place_of_the_one_before(headers, path):
    headers.write(slots_at(1, generation=1), COMMITTED)
    headers.write(slots_at(1, generation=2), WRITING)

    assert found_again(path, COMMITTED) == []
    assert found_again(path, WRITING) == rows(slots_at(1, generation=2))


def test_a_restart_begins_above_every_generation_given_out(headers, path):
    headers.reserve_generations(5)
    assert next_generation(path) > 5

    headers.reserve_generations(3 * GENERATIONS_RESERVED)
    assert next_generation(path) > 3 * GENERATIONS_RESERVED


def test_generations_do_not_repeat_over_restarts_that_write_nothing(path):
    seen = [next_generation(path) for _ in range(4)]

    assert seen == sorted(set(seen))


def test_a_damaged_record_is_left_out_and_the_others_stay(headers, path):
    headers.write(slots_at(0, 1, 2), COMMITTED)
    for position in range(PROLOGUE_BYTES + RECORD_BYTES + 4, PROLOGUE_BYTES + 2 * RECORD_BYTES):
        whole = bytearray(path.read_bytes())
        whole[position] ^= 1
        with path.open("r+b") as file:
            file.write(whole)

        assert headers.drop_unsound() == 1
        assert headers.scan(COMMITTED).pages.tolist() == [0, 2]
        headers.write(slots_at(1), COMMITTED)


@pytest.mark.parametrize("length", [0, (PAGES - 2) * PAGE_BYTES + 1, (1 << 64) - PAGE_BYTES, (1 << 64) - 1])
def test_a_slot_that_reaches_beyond_the_segment_is_left_out(headers, length):
    headers.write(slots_at(2, length=length), COMMITTED)

    assert headers.drop_unsound() == 1
    assert len(headers.scan(COMMITTED)) == 0


def test_a_slot_up_to_the_end_of_the_segment_is_found(headers):
    headers.write(slots_at(2, length=(PAGES - 2) * PAGE_BYTES), COMMITTED)

    assert headers.drop_unsound() == 0
    assert headers.scan(COMMITTED).pages.tolist() == [2]


def test_headers_that_were_read_neither_keep_the_file_mapped_nor_change_with_it(path):
    file = HeaderFile(path, SEGMENT_ID, PAGES)
    file.write(slots_at(3), COMMITTED)
    read = file.scan(COMMITTED)
    file.write(slots_at(3, generation=99), COMMITTED)
    file.close()

    assert rows(read) == rows(slots_at(3))
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_tells_its_segment(headers, path):
    assert stored_segment_id(path, PAGES) == SEGMENT_ID


@pytest.mark.parametrize("pages", [0, PAGES - 1, PAGES + 1])
def test_a_file_of_another_size_tells_no_segment(headers, path, pages):
    assert stored_segment_id(path, pages) is None


@pytest.mark.parametrize(
    "data", [None, b"", bytes(PROLOGUE_BYTES + PAGES * RECORD_BYTES)], ids=["no", "empty", "zeros"]
)
def test_a_missing_empty_or_foreign_file_tells_no_segment(path, data):
    if data is not None:
        path.write_bytes(data)

    assert stored_segment_id(path, PAGES) is None


@pytest.mark.parametrize(
    ("segment_id", "pages", "shown"),
    [(b"x" * 16, PAGES, "not the header file of this segment"), (SEGMENT_ID, PAGES + 1, "another size")],
)
def test_the_file_of_something_else_is_refused_and_left_as_it_is(headers, path, segment_id, pages, shown):
    headers.write(slots_at(1), COMMITTED)
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


def test_all_memory_is_taken_at_the_start(path):
    """So that no later write to the mapping can find memory full, which would end the process with a bus error."""
    HeaderFile(path, SEGMENT_ID, 1 << 12).close()

    assert path.stat().st_blocks * 512 >= header_file_bytes(1 << 12)
