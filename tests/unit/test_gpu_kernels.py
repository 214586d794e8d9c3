"""The CUDA kernels' own source, compiled for the CPU: which bytes they move, and that they compute XXH3."""

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import xxhash

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to compile the kernels for the CPU")

BLOCKS = 9
CHOSEN = [3, 8, 0, 5, 1]
SHAPES = {
    "pages-of-a-KiB": (1024, 4),
    "the-usual": (65_536, 32),
    "pages-shorter-than-a-stripe": (16, 68),
    "stripes-across-pages": (80, 16),
    "last-KiB-is-not-whole": (48, 24),
    "one-run": (2048, 1),
    "less-than-a-KiB": (320, 1),
    "latent-attention-in-fp8": (41_984, 2),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def kernels(request, tmp_path_factory):
    """The compiled kernels, their page and block bytes."""
    page_bytes, layers = request.param
    block_bytes = page_bytes * layers
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = files("kvpool.gpu").joinpath("kernels.cu")
    macros = [f'-DKERNELS="{source}"', f"-DPAGE_BYTES={page_bytes}ull", f"-DBLOCK_BYTES={block_bytes}ull"]
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros, "-o", str(library)]
    subprocess.run([*command, str(Path(__file__).parents[1] / "kernels_on_cpu.cpp")], check=True)
    return ctypes.CDLL(str(library)), page_bytes, layers


@pytest.mark.parametrize("kernel", ["scatter", "gather", "pull", "push", "sum"])
def test_kernels_move_the_right_bytes_and_compute_xxh3(kernels, kernel):
    """Blocks named in any order, layers in any order and spacing, any seed."""
    library, page_bytes, layers = kernels
    rng = np.random.default_rng(5)
    cache = rng.integers(0, 256, (layers + 1, BLOCKS, page_bytes), np.uint8)
    order = rng.permutation(layers + 1)[:layers]
    offsets = (order * BLOCKS * page_bytes).astype(np.uint64)
    packed = rng.integers(0, 256, (BLOCKS, layers, page_bytes), np.uint8)
    # The slots of a node's segment lie anywhere; what is staged is side by side.
    slots = [7, 0, 4, 8, 2] if kernel in {"pull", "push"} else list(range(len(CHOSEN)))
    seeds = rng.integers(0, 2**64, len(CHOSEN), np.uint64)
    before, given = cache.copy(), packed.copy()
    checksums = _run(library, kernel, cache, offsets, page_bytes, packed, seeds, slots)
    pages = before[order][:, CHOSEN].transpose(1, 0, 2)
    moved = given[slots] if kernel in {"scatter", "pull"} else pages
    if kernel in {"scatter", "pull"}:
        before[np.ix_(order, CHOSEN)] = given[slots].transpose(1, 0, 2)
    if kernel in {"gather", "push"}:
        given[slots] = pages
    assert np.array_equal(cache, before)
    assert np.array_equal(packed, given)
    assert checksums == [
        xxhash.xxh3_64_intdigest(np.ascontiguousarray(b), int(s)) for b, s in zip(moved, seeds, strict=True)
    ]


def test_a_calls_table_is_fetched_row_by_row(kernels):
    library, _, _ = kernels
    host, table = np.arange(3 * 50, dtype=np.uint64).reshape(3, 50), np.full((3, 50), 999, np.uint64)
    addresses = [ctypes.c_void_p(rows.ctypes.data) for rows in (table, host)]
    library.run_fetch(*addresses, ctypes.c_uint64(50), ctypes.c_uint64(37))
    assert np.array_equal(table[:, :37], host[:, :37])
    assert (table[:, 37:] == 999).all()


def test_a_changed_byte_changes_the_checksum(kernels):
    library, page_bytes, layers = kernels
    rng = np.random.default_rng(6)
    cache = rng.integers(0, 256, (layers, BLOCKS, page_bytes), np.uint8)
    offsets = np.arange(layers, dtype=np.uint64) * np.uint64(BLOCKS * page_bytes)
    seeds, unused = np.zeros(len(CHOSEN), np.uint64), np.empty(0, np.uint8)
    right = _run(library, "sum", cache, offsets, page_bytes, unused, seeds)
    for layer, at in ((0, 0), (layers - 1, page_bytes - 1), (layers // 2, page_bytes // 2)):
        cache[layer, CHOSEN[2], at] ^= 1
        found = _run(library, "sum", cache, offsets, page_bytes, unused, seeds)
        cache[layer, CHOSEN[2], at] ^= 1
        assert [a == b for a, b in zip(found, right, strict=True)] == [True, True, False, True, True]


def _run(library, kernel, cache, offsets, page_bytes, packed, seeds, slots=()):
    block_bytes, count = page_bytes * len(offsets), len(CHOSEN)
    places = np.array(slots, np.uint64) * np.uint64(block_bytes)
    ids = np.array(CHOSEN, np.uint64)
    sums = np.zeros((count, -(-block_bytes // 1024), 8), np.uint64)
    accumulators, checksums = np.zeros((count, 8), np.uint64), np.zeros(count, np.uint64)

    def at(array):
        return ctypes.c_void_p(array.ctypes.data)

    library.run(
        kernel.encode(),
        *(at(cache), at(offsets), ctypes.c_uint64(page_bytes), at(ids), at(packed), at(places), at(seeds)),
        *(at(sums), at(accumulators), at(checksums), ctypes.c_uint64(count)),
    )
    return checksums.tolist()
