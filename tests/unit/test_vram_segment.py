"""A segment in a device's memory: copies in and out, devices that fail or are not there, and the files beside it."""

import numpy as np
import pytest

from kvpool.core.directory import VRAM
from kvpool.core.errors import CapacityError, SettingsError, UnavailableError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.node.files import SegmentFiles
from kvpool.node.segment import VramSegment
from kvpool.transport import devices
from tests.host_device import BROKEN, HostMemory

PAGES = 8
DEVICE = "host:0"


@pytest.fixture
def segment():
    segment = VramSegment(b"v" * 16, PAGES * PAGE_BYTES, HostMemory(0, PAGES * PAGE_BYTES))
    yield segment
    segment.close()


@pytest.fixture
def files(tmp_path):
    files = SegmentFiles(tmp_path, "n0")
    yield files
    files.close(keep=True)


def pages_of_random(segment, pages):
    view = segment.buffer(pages * PAGE_BYTES)
    view[:] = np.random.default_rng(pages).bytes(len(view))
    return view


def test_what_was_written_is_read_back_and_nothing_else_changes(segment):
    first, second = pages_of_random(segment, 1), pages_of_random(segment, 2)

    assert segment.write([(6, first), (1, second)]) == [None, None]

    found = [segment.buffer(2 * PAGE_BYTES), segment.buffer(PAGE_BYTES)]
    assert segment.read([(1, found[0]), (6, found[1])]) == [None, None]
    assert found == [second, first]
    assert segment.view(1, 2 * PAGE_BYTES - 100) == second[:-100]
    for page in (0, 3, 4, 5, 7):
        assert not any(segment.view(page, PAGE_BYTES))
    assert (segment.medium, segment.where, len(segment.payload)) == (VRAM, DEVICE, 0)


def test_a_buffer_holds_whole_pages(segment):
    assert [len(segment.buffer(n)) for n in (1, PAGE_BYTES, PAGE_BYTES + 1)] == [PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]


def test_a_device_that_fails_gives_an_error_for_each_slot(segment, tmp_path, monkeypatch):
    monkeypatch.setenv(BROKEN, str(tmp_path / "broken"))
    (tmp_path / "broken").touch()
    extents = [(page, segment.buffer(PAGE_BYTES)) for page in range(2)]

    assert [str(error) for error in segment.read(extents)] == ["the device has fallen off the bus"] * 2
    assert [str(error) for error in segment.write(extents)] == ["the device has fallen off the bus"] * 2
    with pytest.raises(OSError, match="fallen off"):
        segment.view(0, 1)


def test_it_is_no_file(segment):
    with pytest.raises(UsageError, match="is no file"):
        segment.descriptors()


def test_each_start_has_another_segment_and_empty_headers(files):
    found = []
    for _ in range(2):
        segment, headers = files.open_device(PAGES * PAGE_BYTES, DEVICE)
        found.append((segment.segment_id, headers.next_generation, files.fresh))
        headers.close()
        segment.close()

    assert found[0][0] != found[1][0]
    assert found[0][1:] == found[1][1:] == (1, True)


def test_memory_that_cannot_be_had_costs_no_blocks_of_shared_memory(files):
    segment, headers = files.open(PAGES * PAGE_BYTES, "off")
    segment.payload[:4] = np.frombuffer(b"kept", np.uint8)
    headers.close()
    segment.close()

    with pytest.raises(CapacityError, match="choose a smaller --vram"):
        files.open_device(1 << 40, DEVICE)

    assert not files.fresh
    segment, headers = files.open(PAGES * PAGE_BYTES, "off")
    assert segment.payload[:4].tobytes() == b"kept"
    headers.close()
    segment.close()


@pytest.mark.parametrize("device", ["rocm:0", "cuda", "cuda:", "cuda:-1", "cuda:1234", "", "CUDA:0", "cuda:0,1"])
def test_a_device_that_is_not_known_is_named_with_one_that_is(device):
    with pytest.raises(SettingsError, match=r"write e\.g\. cuda:0"):
        devices.parse_device(device)


def test_without_cupy_a_node_and_a_client_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(UnavailableError, match=r"pip install 'kvpool\[cuda13\]'"):
        devices.allocate("cuda:0", PAGE_BYTES)
    with pytest.raises(UnavailableError, match=r"pip install 'kvpool\[cuda13\]'"):
        devices.attach("cuda", b"handle", PAGE_BYTES)
    with pytest.raises(SettingsError, match="'tpu:0' is not known"):
        devices.attach("tpu", b"handle", PAGE_BYTES)
