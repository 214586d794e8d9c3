"""The shared memory segment: all there from the start, or refused with nothing left behind."""

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES
from kvpool.node.segment import ShmSegment, shm

SEGMENT_ID = b"s" * 16
SIZE_BYTES = 16 * PAGE_BYTES


@pytest.fixture
def path(tmp_path):
    return tmp_path / "payload"


@pytest.fixture
def segment(path):
    made = ShmSegment(path, SEGMENT_ID, SIZE_BYTES)
    yield made
    made.close()


def test_all_its_pages_are_allocated_and_zero(segment, path):
    assert segment.size_bytes == SIZE_BYTES == path.stat().st_size
    assert path.stat().st_blocks * 512 >= SIZE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(segment.payload) == SIZE_BYTES
    assert not segment.payload.any()


def test_the_size_is_rounded_down_to_whole_pages(path):
    segment = ShmSegment(path, SEGMENT_ID, SIZE_BYTES + PAGE_BYTES - 1)
    segment.close()

    assert segment.size_bytes == SIZE_BYTES


def test_its_descriptors_map_the_same_bytes(segment):
    read_descriptor, write_descriptor = segment.descriptors()
    with mmap.mmap(write_descriptor, SIZE_BYTES) as writable:
        writable[5:8] = b"new"
    with mmap.mmap(read_descriptor, SIZE_BYTES, prot=mmap.PROT_READ) as readable:
        assert readable[5:8] == b"new" == segment.payload[5:8].tobytes()


def test_the_read_descriptor_cannot_write(segment):
    read_descriptor, _ = segment.descriptors()

    with pytest.raises(PermissionError):
        mmap.mmap(read_descriptor, SIZE_BYTES, prot=mmap.PROT_WRITE)


def test_a_restart_finds_the_bytes_again(path):
    first = ShmSegment(path, SEGMENT_ID, SIZE_BYTES)
    first.payload[:4] = np.frombuffer(b"kept", np.uint8)
    first.close()

    second = ShmSegment(path, SEGMENT_ID, SIZE_BYTES)
    kept = second.payload[:4].tobytes()
    second.close()

    assert kept == b"kept"


def test_a_segment_too_large_is_refused_with_both_sizes_and_the_fix_and_leaves_nothing(path, tmp_path):
    with pytest.raises(CapacityError) as caught:
        ShmSegment(path, SEGMENT_ID, 1 << 60)

    message = str(caught.value)
    assert f"a segment of 1024 PiB does not fit {tmp_path}, which has " in message
    assert " free; choose a smaller --size or enlarge it (docker: --shm-size, mount: -o remount,size=)" in message
    assert list(tmp_path.iterdir()) == []


def test_a_segment_too_large_leaves_the_one_before_it_alone(path):
    path.write_bytes(b"kept")

    with pytest.raises(CapacityError):
        ShmSegment(path, SEGMENT_ID, 1 << 60)
    assert path.read_bytes() == b"kept"


@pytest.mark.parametrize("size_bytes", [0, PAGE_BYTES - 1])
def test_a_segment_without_a_page_is_refused(path, size_bytes):
    with pytest.raises(CapacityError, match=f"a segment of {size_bytes} bytes holds no page of {PAGE_BYTES}"):
        ShmSegment(path, SEGMENT_ID, size_bytes)
    assert not path.exists()


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "absent" / "payload"

    with pytest.raises(CapacityError, match=str(path)):
        ShmSegment(path, SEGMENT_ID, SIZE_BYTES)


def test_a_link_planted_in_its_place_is_not_followed(path, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.symlink_to(target)

    with pytest.raises(CapacityError, match=str(path)):
        ShmSegment(path, SEGMENT_ID, SIZE_BYTES)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("state", ["always [never] advise", "[deny]"])
def test_huge_pages_that_are_required_and_not_offered_are_refused_before_memory_is_taken(
    path, tmp_path, monkeypatch, state
):
    offered = tmp_path / "shmem_enabled"
    offered.write_text(f"{state}\n")
    monkeypatch.setattr(shm, "HUGE_PAGES_STATE", offered)

    with pytest.raises(CapacityError, match=r"huge pages for shared memory are off .*set hugepages to auto"):
        ShmSegment(path, SEGMENT_ID, SIZE_BYTES, "require")
    assert not path.exists()


@pytest.mark.parametrize("hugepages", ["auto", "off"])
def test_huge_pages_that_are_not_offered_are_done_without(path, tmp_path, monkeypatch, hugepages):
    monkeypatch.setattr(shm, "HUGE_PAGES_STATE", tmp_path / "no such file")

    segment = ShmSegment(path, SEGMENT_ID, SIZE_BYTES, hugepages)
    segment.close()

    assert not segment.huge


def test_closing_leaves_the_file_and_neither_thread_nor_descriptor_nor_mapping(path):
    threads = set(threading.enumerate())
    segment = ShmSegment(path, SEGMENT_ID, SIZE_BYTES)
    descriptors = segment.descriptors()
    segment.close()

    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert set(threading.enumerate()) <= threads
    assert path.exists()


def test_a_transfer_that_is_ending_keeps_its_bytes_after_closing(path):
    segment = ShmSegment(path, SEGMENT_ID, SIZE_BYTES)
    view = segment.payload[:PAGE_BYTES].data
    segment.close()

    assert bytes(view[:4]) == bytes(4)
    assert len(segment.payload) == 0
