"""The files of a node's segment: one process at a time, taken over by the next one when they fit."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.node.files import SegmentFiles
from kvpool.node.headers import SlotHeaders, make_records
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.segment import shm

SIZE_BYTES = 8 * PAGE_BYTES
SMALL_MEMORY_BYTES = 1 << 20


def slot_at(page):
    return SlotHeaders(np.array([page], np.uint32), make_records(1, length=10, generation=5, hash=b"h" * 32))


def open_files(directory):
    """Paths under ``directory`` that this process has open."""
    links = list(Path("/proc/self/fd").iterdir())
    return [link for link in links if link.is_symlink() and link.readlink().is_relative_to(directory)]


@pytest.fixture
def small_memory(tmp_path):
    """Shared memory of a few pages, as in a container."""
    directory = tmp_path / "shm"
    directory.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_MEMORY_BYTES}", "tmpfs", str(directory)]
    if subprocess.run(options, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def run(tmp_path):
    """One run of a node: takes its files, finds what is there, perhaps writes a slot, and ends."""

    def run(size_bytes=SIZE_BYTES, *, node_id="n0", write=False, keep=True):
        files = SegmentFiles(tmp_path, node_id)
        segment, headers = files.open(size_bytes, "off")
        found = segment.segment_id, segment.payload[:4].tobytes(), headers.scan(SlotState.COMMITTED).named()
        if write:
            segment.payload[:4] = np.frombuffer(b"kept", np.uint8)
            headers.write(slot_at(2), SlotState.COMMITTED)
        headers.close()
        segment.close()
        files.close(keep=keep)
        return found

    return run


def test_a_restart_finds_segment_bytes_and_headers(run):
    segment_id, *_ = run(write=True)

    assert run() == (segment_id, b"kept", [(2, 5)])


def test_a_segment_of_another_size_begins_empty_under_another_id(run):
    segment_id, *_ = run(write=True)

    other_id, payload, headers = run(SIZE_BYTES + PAGE_BYTES)

    assert other_id != segment_id
    assert (bytes(4), []) == (payload, headers)


@pytest.mark.parametrize("lost", ["payload", "headers"])
def test_half_of_the_files_is_not_taken_over(run, tmp_path, lost):
    segment_id, *_ = run(write=True)
    (tmp_path / f"kvpool-n0.{lost}").unlink()

    other_id, payload, headers = run()

    assert other_id != segment_id
    assert (bytes(4), []) == (payload, headers)


def test_a_namespace_that_finds_memory_full_is_refused(small_memory):
    (small_memory / "full").write_bytes(bytes(SMALL_MEMORY_BYTES))
    book = NamespaceBook(small_memory / "namespaces", lambda _: b"known")

    with pytest.raises(CapacityError, match="takes no more documents"):
        book.learn(b"n" * 32)
    assert book.get(b"n" * 32) is None


def test_files_of_another_node_are_not_touched(run):
    run(write=True)

    assert run(node_id="n1")[1:] == (bytes(4), [])
    assert run()[1:] == (b"kept", [(2, 5)])


def test_a_second_process_of_the_same_name_is_refused_with_the_fix(tmp_path):
    files = SegmentFiles(tmp_path, "n0")

    with pytest.raises(CapacityError, match=r"another node 'n0' uses .*give this one another --node-id"):
        SegmentFiles(tmp_path, "n0")

    files.close(keep=True)
    assert open_files(tmp_path) == []


def test_the_files_are_free_once_closed(tmp_path):
    SegmentFiles(tmp_path, "n0").close(keep=True)
    SegmentFiles(tmp_path, "n0").close(keep=True)


def test_nothing_is_left_when_the_files_are_not_kept(run, tmp_path):
    run(write=True)
    run(keep=False)

    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_refused_with_the_fix(tmp_path):
    with pytest.raises(CapacityError, match="choose another segment_dir"):
        SegmentFiles(tmp_path / "absent", "n0")


def test_a_segment_that_cannot_be_had_leaves_only_the_lock(tmp_path):
    files = SegmentFiles(tmp_path, "n0")

    with pytest.raises(CapacityError, match="does not fit"):
        files.open(1 << 60, "off")

    assert [path.name for path in tmp_path.iterdir()] == ["kvpool-n0.lock"]
    files.close(keep=False)


def test_memory_without_room_for_headers_is_refused_and_given_back(small_memory):
    files = SegmentFiles(small_memory, "n0")

    with pytest.raises(CapacityError, match="does not fit"):
        files.open(SMALL_MEMORY_BYTES, "off")
    assert [path.name for path in small_memory.iterdir()] == ["kvpool-n0.lock"]

    files.close(keep=False)


def test_a_start_that_fails_keeps_the_blocks_of_the_last_run(run, tmp_path, monkeypatch):
    segment_id, *_ = run(write=True)
    monkeypatch.setattr(shm, "HUGE_PAGES_STATE", tmp_path / "no huge pages here")
    files = SegmentFiles(tmp_path, "n0")

    with pytest.raises(CapacityError, match="huge pages"):
        files.open(SIZE_BYTES, "require")
    with pytest.raises(CapacityError, match="does not fit"):
        files.open(1 << 60, "off")
    files.close(keep=True)

    assert run() == (segment_id, b"kept", [(2, 5)])
