"""Lists of copies for the copy engine, carried out here by NumPy; and what a cache on a GPU refuses."""

import numpy as np
import pytest

from kvpool.core.errors import InvalidBufferError, UnavailableError
from kvpool.gpu import GpuCache, PageRuns
from kvpool.gpu.copies import packed_copies, page_copies
from kvpool.gpu.layout import check_for_gpu

PIECE_BYTES = 4096


def carry_out(copies, host, device):
    """Copies from host memory to the device's, both of which begin at address 0."""
    for h, d, size in zip(copies.host.tolist(), copies.device.tolist(), copies.size_bytes.tolist(), strict=True):
        device[d : d + size] = host[h : h + size]


@pytest.mark.parametrize("page_bytes", [64, 1000, 9000])
def test_pages_land_where_the_layout_says(page_bytes):
    """Layers unevenly spaced, pages with gaps between them, blocks in any order; cut where host memory is."""
    rng = np.random.default_rng(1)
    stride = page_bytes + 48
    runs = PageRuns((9 * stride + 7, 0, 30 * stride), stride, page_bytes, 8)
    host = rng.integers(0, 256, 40 * page_bytes, np.uint8)
    device = rng.integers(0, 256, runs.end, np.uint8)
    ids, starts = np.array([6, 0, 3], np.uint64), np.array([5, 17, 11], np.uint64) * np.uint64(page_bytes)
    expected = device.copy()
    for block, start in zip(ids.tolist(), starts.tolist(), strict=True):
        for layer, offset in enumerate(runs.offsets):
            at, begin = offset + block * stride, start + layer * page_bytes
            expected[at : at + page_bytes] = host[begin : begin + page_bytes]
    copies = page_copies(runs, 0, ids, starts).within(100, PIECE_BYTES)
    carry_out(copies, host, device)
    assert np.array_equal(device, expected)
    borders = (copies.host - 100) // PIECE_BYTES == (copies.host + copies.size_bytes - 101) // PIECE_BYTES
    assert borders[copies.host >= 100].all()


def test_neighbours_are_copied_together():
    starts = np.array([3, 4, 5, 9, 7, 8], np.uint64) * np.uint64(64)
    copies = packed_copies(64, 0, starts)
    assert copies.size_bytes.tolist() == [192, 64, 128]
    host, device = np.random.default_rng(2).integers(0, 256, 640, np.uint8), np.zeros(384, np.uint8)
    carry_out(copies, host, device)
    assert np.array_equal(device.reshape(6, 64), host.reshape(10, 64)[[3, 4, 5, 9, 7, 8]])


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        (PageRuns((0,), 1032, 1032, 4), "bytes of a page"),
        (PageRuns((0, 8), 1024, 1024, 4), "layer begins"),
        (PageRuns((0,), 1032, 1024, 4), "one block to the next"),
        (PageRuns((0,), 1040, 1040, 4), "bytes of a block"),
        (PageRuns((0,), 128, 128, 4), "from 256"),
    ],
)
def test_layouts_that_kernels_cannot_move_are_named(runs, named):
    with pytest.raises(InvalidBufferError, match=named):
        check_for_gpu(runs, 0)


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(UnavailableError, match=r"pip install 'kvpool\[cuda13\]'"):
        GpuCache(0, PageRuns((0,), 1024, 1024, 4))
