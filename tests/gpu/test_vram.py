"""Blocks in the memory of a GPU, held by a node in another process: every way to them, byte for byte."""

import threading

import numpy as np
import pytest

import kvpool
from kvpool.core.directory import MissReason
from kvpool.core.limits import PAGE_BYTES
from kvpool.gpu import GpuCache, PageRuns
from tests.gpu.conftest import chain, open_blocks, random_bytes
from tests.gpu.test_round_trips import SOURCE, TARGET, make_caches

COUNT = 16
WAYS = {"layered": (16 << 10, 4), "whole": (64 << 10, 1), "odd-pages": (80, 16), "by-copy-engine": (1 << 20, 1)}


def make_cache(cupy, page_bytes, layers, blocks=2 * COUNT):
    """A cache of random bytes, and its memory as (layers, blocks, page bytes)."""
    memory = cupy.asarray(random_bytes(layers * blocks * page_bytes))
    offsets = tuple(layer * blocks * page_bytes for layer in range(layers))
    cache = GpuCache(memory.data.ptr, PageRuns(offsets, page_bytes, page_bytes, blocks), owner=memory)
    return cache, memory.reshape(layers, blocks, page_bytes)


def mapped(cupy, client):
    """The node's memory, as this process has it mapped, to do harm in."""
    [(_, transport)] = client._nodes._transports.items()
    memory = transport._memory
    raw = cupy.cuda.UnownedMemory(memory.address(0), len(memory), memory, 0)
    return cupy.ndarray(len(memory), np.uint8, cupy.cuda.MemoryPointer(raw, 0))


def places_of(cupy, segment, block):
    """Where the node holds a block."""
    pages = segment.view(np.uint64)[:: PAGE_BYTES // 8]
    starts = cupy.flatnonzero(pages == block[:8].view(np.uint64)[0]).get() * PAGE_BYTES
    return [int(start) for start in starts if np.array_equal(segment[start : start + len(block)].get(), block)]


def flip(cupy, segment, places):
    """Flip a bit of each of these bytes."""
    for place in places:
        segment[place] ^= 0x10
    cupy.cuda.runtime.deviceSynchronize()


@pytest.mark.parametrize(
    ("dtype", "transport"),
    [("bfloat16", "cuda"), ("float16", "cuda"), ("float8_e4m3fn", "cuda"), ("bfloat16", "shm"), ("bfloat16", "tcp")],
)
def test_what_one_cache_saves_another_loads(torch, pages, vram_pool, dtype, transport):
    ours, our_memory = make_caches(torch, "LBHNC", dtype, 8, 64)
    theirs, their_memory = make_caches(torch, "LBHNC", dtype, 8, 64)
    their_memory.view(torch.uint8).bitwise_xor_(0x5A)
    source, target = pages.open_pages(ours), pages.open_pages(theirs)
    client = vram_pool.connect(transport)
    keyspace, hashes = open_blocks(client, source.runs.block_bytes), chain(len(SOURCE))
    expected = [cache.view(torch.uint8).clone() for cache in theirs.values()]
    for cache, bytes_of in zip(ours.values(), expected, strict=True):
        bytes_of[TARGET] = cache.view(torch.uint8)[SOURCE]
    before = our_memory.view(torch.uint8).clone()
    torch.cuda.synchronize()

    assert keyspace.store(hashes, source.direct(SOURCE)).stored == len(SOURCE)
    assert keyspace.load(hashes, target.direct(TARGET)).loaded == len(SOURCE)

    for cache, bytes_of in zip(theirs.values(), expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), bytes_of)
    assert torch.equal(our_memory.view(torch.uint8), before)
    assert set(client.stats().loaded_bytes) == {transport}


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_goes_from_gpu_to_gpu_and_to_the_host(cupy, vram_pool, way):
    page_bytes, layers = WAYS[way]
    cache, memory = make_cache(cupy, page_bytes, layers)
    keyspace, hashes = open_blocks(vram_pool.connect("cuda"), cache.runs.block_bytes), chain(COUNT)
    sources, targets = list(range(0, 2 * COUNT, 2)), list(range(2 * COUNT - 1, 0, -2))
    right = memory.get()
    assert keyspace.store(hashes, cache.blocks(sources)).stored == COUNT
    memory[:, targets] = 0
    cupy.cuda.runtime.deviceSynchronize()

    assert keyspace.load(hashes, cache.blocks(targets)).loaded == COUNT

    right[:, targets] = right[:, sources]
    assert np.array_equal(memory.get(), right)
    host = np.empty((COUNT, cache.runs.block_bytes), np.uint8)
    assert keyspace.load(hashes, host).loaded == COUNT
    assert np.array_equal(host.reshape(COUNT, layers, page_bytes), right[:, sources].transpose(1, 0, 2))
    assert keyspace.store(names := chain(COUNT), host).stored == COUNT
    memory[:, targets] = 0
    cupy.cuda.runtime.deviceSynchronize()
    assert keyspace.load(names, cache.blocks(targets)).loaded == COUNT
    assert np.array_equal(memory.get(), right)


def test_the_transport_is_chosen_before_others_and_shown(cupy, vram_pool):
    client = vram_pool.connect("cuda", "shm", "tcp")
    [node] = client.status(reach=True).nodes
    assert node.transport == "cuda"
    assert [segment.medium for segment in node.segments] == ["vram"]


def test_a_flipped_bit_is_a_miss(cupy, vram_pool):
    cache, memory = make_cache(cupy, 16 << 10, 4)
    client = vram_pool.connect("cuda")
    keyspace = open_blocks(client, cache.runs.block_bytes)
    third = np.ascontiguousarray(memory[:, 3].get()).reshape(-1)
    for where in (0, len(third) // 2 + 1, len(third) - 1):
        hashes = chain(8)
        assert keyspace.store(hashes, cache.blocks(range(8))).stored == 8
        segment = mapped(cupy, client)
        harmed = [place + where for place in places_of(cupy, segment, third)]
        assert harmed
        flip(cupy, segment, harmed)
        result = keyspace.load(hashes, cache.blocks(range(16, 24)))
        flip(cupy, segment, harmed)
        assert result.reasons[3] == MissReason.VERIFY_FAILED
        assert [reason for i, reason in enumerate(result.reasons) if i != 3] == [None] * 7


def test_what_is_reported_loaded_is_right_while_slots_are_reused(cupy, start_vram_pool):
    """Another client stores blocks all the time, in a pool that holds few: slots change hands while they are read."""
    pool = start_vram_pool(vram="1536KiB", device=f"cuda:{cupy.cuda.runtime.getDeviceCount() - 1}")
    cache, memory = make_cache(cupy, 16 << 10, 4)
    right = memory.get()[:, :8]
    keyspace = open_blocks(pool.connect("cuda"), cache.runs.block_bytes)
    other = open_blocks(pool.connect("cuda"), cache.runs.block_bytes)
    ended, outcomes = threading.Event(), []

    def churn():
        while not ended.is_set():
            other.store(chain(8), cache.blocks(range(24, 32)))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(60):
            hashes = chain(8)
            keyspace.store(hashes, cache.blocks(range(8)))
            for _ in range(4):
                result = keyspace.load(hashes, cache.blocks(range(8, 16)))
                found = memory[:, 8:16].get()
                outcomes.append(result.loaded)
                for i, reason in enumerate(result.reasons):
                    assert reason is not None or np.array_equal(found[:, i], right[:, i])
    finally:
        ended.set()
        thread.join()
    assert any(outcomes), "nothing was ever loaded"


def test_threads_share_a_mapping(cupy, vram_pool):
    cache, memory = make_cache(cupy, 16 << 10, 4)
    keyspace, failures = open_blocks(vram_pool.connect("cuda"), cache.runs.block_bytes), []
    right = memory.get()

    def work(first):
        for _ in range(10):
            hashes = chain(4)
            stored = keyspace.store(hashes, cache.blocks(range(first, first + 4))).stored
            loaded = keyspace.load(hashes, cache.blocks(range(first + 4, first + 8))).loaded
            if (stored, loaded) != (4, 4):
                failures.append((stored, loaded))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 8, 16, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = memory.get()
    for first in (0, 8, 16, 24):
        assert np.array_equal(found[:, first + 4 : first + 8], right[:, first : first + 4])


def test_the_node_verifies_what_it_holds(cupy, vram_pool):
    cache, memory = make_cache(cupy, 16 << 10, 4)
    client = vram_pool.connect("cuda")
    keyspace, hashes = open_blocks(client, cache.runs.block_bytes), chain(8)
    assert keyspace.store(hashes, cache.blocks(range(8))).stored == 8
    assert vram_pool.verify()["bad"] == 0
    segment = mapped(cupy, client)
    [place, *_] = places_of(cupy, segment, np.ascontiguousarray(memory[:, 5].get()).reshape(-1))
    flip(cupy, segment, [place + 100])
    assert vram_pool.verify()["bad"] == 1


def test_memory_that_is_not_there_is_refused(cupy, start_vram_pool):
    devices = cupy.cuda.runtime.getDeviceCount()
    with pytest.raises(kvpool.UnavailableError, match=f"there is no GPU cuda:{devices}"):
        start_vram_pool(vram="1GiB", device=f"cuda:{devices}")
    with pytest.raises(kvpool.UnavailableError, match="choose a smaller --vram"):
        start_vram_pool(vram="10TiB", device="cuda:0")
