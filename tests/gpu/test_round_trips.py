"""Every layout, dtype, way and transport: what one cache saved another one loads, byte for byte, and nothing else."""

import numpy as np
import pytest
import xxhash

from kvpool.core.errors import InvalidBufferError
from kvpool.gpu import GpuCache, PageRuns
from tests.gpu.conftest import chain, open_blocks, random_bytes

BLOCKS, LAYERS, TOKENS = 40, 4, 16
SOURCE, TARGET = [30, 2, 17, 3, 4, 5, 21], [11, 39, 0, 8, 9, 10, 22]
ORDERS = {  # where each of (layers, blocks, heads, tokens) lies in memory, outermost first; vLLM's names
    "LBHNC": (0, 1, 2, 3),
    "LBNHC": (0, 1, 3, 2),
    "BLHNC": (1, 0, 2, 3),
    "BLNHC": (1, 0, 3, 2),
    "BHLNC": (1, 2, 0, 3),
}
DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8"]


def make_caches(torch, layout, dtype, heads, head_bytes):
    """One tensor a layer, shaped (blocks, heads, tokens, content), in one allocation of random bytes."""
    size = (LAYERS, BLOCKS, heads, TOKENS)
    order = ORDERS[layout]
    memory = torch.from_numpy(random_bytes(int(np.prod(size)) * head_bytes)).cuda().view(getattr(torch, dtype))
    memory = memory.reshape(*(size[axis] for axis in order), -1)
    logical = memory.permute(*np.argsort(order).tolist(), 4)
    return {f"layers.{i}": logical[i] for i in range(LAYERS)}, memory


@pytest.mark.parametrize(("dtype", "transport"), [*((dtype, "shm") for dtype in DTYPES), ("bfloat16", "tcp")])
@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("head_bytes", [64, 512], ids=["small-pages", "large-pages"])
def test_what_one_cache_saves_another_loads(torch, pages, clients, layout, dtype, head_bytes, transport):
    """Small pages go through kernels, large ones by the copy engine where a block's page is one run."""
    ours, our_memory = make_caches(torch, layout, dtype, 8, head_bytes)
    theirs, their_memory = make_caches(torch, layout, dtype, 8, head_bytes)
    their_memory.view(torch.uint8).bitwise_xor_(0x5A)
    source, target = pages.open_pages(ours), pages.open_pages(theirs)
    assert isinstance(source, pages.GpuPages)
    keyspace, hashes = open_blocks(clients[transport], source.runs.block_bytes), chain(len(SOURCE))
    expected = [cache.view(torch.uint8).clone() for cache in theirs.values()]
    for cache, bytes_of in zip(ours.values(), expected, strict=True):
        bytes_of[TARGET] = cache.view(torch.uint8)[SOURCE]
    before = our_memory.view(torch.uint8).clone()
    for pinned in (False, True):  # the first transfers may meet memory that is not page-locked yet
        names = hashes if not pinned else chain(len(SOURCE))
        assert keyspace.store(names, source.direct(SOURCE)).stored == len(SOURCE)
        their_memory.view(torch.uint8)[..., :1] ^= 1
        for bytes_of, cache in zip(expected, theirs.values(), strict=True):
            others = [i for i in range(BLOCKS) if i not in TARGET]
            bytes_of[others] = cache.view(torch.uint8)[others]
        assert keyspace.load(names, target.direct(TARGET)).loaded == len(SOURCE)
        for cache, bytes_of in zip(theirs.values(), expected, strict=True):
            assert torch.equal(cache.view(torch.uint8), bytes_of)
        assert source._cache.wait_pinned(60)
    assert torch.equal(our_memory.view(torch.uint8), before)


@pytest.mark.parametrize(
    ("page_bytes", "layers"),
    [(16, 68), (80, 16), (48, 24), (320, 1), (1024, 4), (41_984, 2), (65_536, 8), (1 << 20, 3)],
)
@pytest.mark.parametrize("copy_engine", [True, False])
def test_checksums_are_xxh3(cupy, page_bytes, layers, copy_engine):
    """Keys and values apart, layers in any order: a description of pages is all that it takes."""
    block_bytes = page_bytes * layers
    memory = cupy.asarray(random_bytes(BLOCKS * block_bytes))
    order = np.random.default_rng(layers).permutation(layers).tolist()
    runs = PageRuns(tuple(layer * BLOCKS * page_bytes for layer in order), page_bytes, page_bytes, BLOCKS)
    cache = GpuCache(memory.data.ptr, runs, owner=memory, copy_engine=copy_engine)
    pages = memory.get().reshape(layers, BLOCKS, page_bytes)
    expected = np.ascontiguousarray(pages[order][:, SOURCE].transpose(1, 0, 2)).reshape(len(SOURCE), block_bytes)
    seeds = [0, 1, 2**64 - 1, 12345, 2**63, 7, 8]
    host = np.zeros((len(SOURCE) + 1) * block_bytes, np.uint8)
    starts = np.array([5, 1, 2, 0, 3, 7, 4], np.uint64) * np.uint64(block_bytes)
    found = cache.blocks(SOURCE).begin_store(host, starts, lambda: seeds, lasting=False)()
    assert found.tolist() == [xxhash.xxh3_64_intdigest(b, seed) for b, seed in zip(expected, seeds, strict=True)]
    assert np.array_equal(host.reshape(-1, block_bytes)[[5, 1, 2, 0, 3, 7, 4]], expected)
    loaded = cache.blocks(TARGET).begin_load(host, starts, lambda: seeds, lasting=False)()
    assert loaded.tolist() == found.tolist()


@pytest.mark.parametrize(("page_bytes", "layers"), [(65_536, 8), (1 << 19, 1), (8192, 64)])
@pytest.mark.parametrize("copy_engine", [True, False])
def test_long_calls_are_moved_in_steps(cupy, clients, monkeypatch, page_bytes, layers, copy_engine):
    """Several look-ups, lists, staging buffers and grants in a call, all of them under way at once."""
    monkeypatch.setattr("kvpool.client.loading.FAR_STEP_BLOCKS", 20)
    blocks, block_bytes = 120, page_bytes * layers
    memory = cupy.asarray(random_bytes(2 * blocks * block_bytes))
    offsets = tuple(layer * 2 * blocks * page_bytes for layer in range(layers))
    runs = PageRuns(offsets, page_bytes, page_bytes, 2 * blocks)
    cache = GpuCache(memory.data.ptr, runs, owner=memory, copy_engine=copy_engine)
    order = np.random.default_rng(7).permutation(2 * blocks)
    source, target = order[:blocks], order[blocks:]
    keyspace, hashes = open_blocks(clients["shm"], block_bytes), chain(blocks)
    pages = memory.reshape(layers, 2 * blocks, page_bytes)
    before = pages.get()
    assert keyspace.store(hashes, cache.blocks(source)).stored == blocks
    for _ in range(2):  # the first one may meet memory that is not page-locked yet
        pages[:, target] = 0
        cupy.cuda.runtime.deviceSynchronize()
        assert keyspace.load(hashes, cache.blocks(target)).loaded == blocks
        assert np.array_equal(pages.get()[:, target], before[:, source])
        assert np.array_equal(pages.get()[:, source], before[:, source])
        assert cache.wait_pinned(60)


def test_a_contiguous_array_is_a_cache(cupy, torch, clients):
    source, target = torch.randn(BLOCKS, 64, 64, device="cuda"), cupy.zeros((BLOCKS, 64, 64), np.float32)
    keyspace, hashes = open_blocks(clients["shm"], 64 * 64 * 4), chain(3)
    torch.cuda.synchronize()
    assert keyspace.store(hashes, GpuCache.of(source).blocks([5, 6, 1])).stored == 3
    assert keyspace.load(hashes, GpuCache.of(target).blocks([0, 39, 20])).loaded == 3
    assert np.array_equal(target.get()[[0, 39, 20]], source.cpu().numpy()[[5, 6, 1]])


def test_what_cannot_be_is_refused(cupy):
    cache = GpuCache.of(cupy.zeros((8, 1024), np.uint8))
    for ids, named in (([0, 8], "0 to 7"), ([-1], "0 to 7"), ([3, 3], "twice")):
        with pytest.raises(InvalidBufferError, match=named):
            cache.blocks(ids)
    with pytest.raises(InvalidBufferError, match="not contiguous"):
        GpuCache.of(cupy.zeros((8, 2048), np.uint8)[:, :1024])
    with pytest.raises(InvalidBufferError, match="no CUDA array"):
        GpuCache.of(np.zeros((8, 1024), np.uint8))


def test_without_cupy_torch_moves_the_pages_and_says_so(torch, pages, caplog, monkeypatch):
    """The slow way, with one warning that says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    caches, memory = make_caches(torch, "LBHNC", "bfloat16", 2, 512)
    moved = pages.open_pages(caches)
    assert type(moved) is pages.DevicePages
    assert moved.direct([1]) is None
    assert "pip install 'kvpool[cuda13]'" in caplog.text
    out = np.empty((len(SOURCE), moved.runs.block_bytes), np.uint8)
    moved.gather(SOURCE, out)
    moved.scatter(TARGET, out)
    bytes_of = memory.view(torch.uint8).reshape(LAYERS, BLOCKS, -1)
    assert torch.equal(bytes_of[:, TARGET], bytes_of[:, SOURCE])
