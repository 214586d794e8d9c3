"""G1 for GPU memory: the right bytes or a miss, whatever happens to shared memory; and no stream is held up."""

import gc
import importlib
import mmap
import threading

import numpy as np
import pytest

import kvpool
from kvpool.core.directory import MissReason
from kvpool.core.limits import PAGE_BYTES
from kvpool.gpu import GpuCache, PageRuns
from tests.gpu.conftest import chain, open_blocks, random_bytes

BLOCKS = 32
LAYERS = 4
WAYS = {"copy-engine": (64 << 10, True), "kernels": (64 << 10, False), "small-pages": (4 << 10, True)}


@pytest.fixture(params=WAYS)
def cache(cupy, request):
    page_bytes, copy_engine = WAYS[request.param]
    memory = cupy.asarray(random_bytes(LAYERS * BLOCKS * page_bytes))
    offsets = tuple(layer * BLOCKS * page_bytes for layer in range(LAYERS))
    runs = PageRuns(offsets, page_bytes, page_bytes, BLOCKS)
    return GpuCache(memory.data.ptr, runs, owner=memory, copy_engine=copy_engine)


@pytest.fixture
def segment(pool):
    """The node's shared memory, to do harm in."""
    with pool.segment.open("r+b") as file:
        yield np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def places_of(segment, block):
    """Where the segment holds a block: slots begin on pages; it may have been stored under several names."""
    pages = segment.view(np.uint64)[:: PAGE_BYTES // 8]
    starts = np.flatnonzero(pages == block[:8].view(np.uint64)) * PAGE_BYTES
    return [int(start) for start in starts if np.array_equal(segment[start : start + len(block)], block)]


def bytes_of(cache):
    """The cache as (blocks, block bytes) on the host."""
    pages = cache._owner.get().reshape(LAYERS, BLOCKS, -1)
    return np.ascontiguousarray(pages.transpose(1, 0, 2)).reshape(BLOCKS, -1)


def test_a_flipped_bit_is_a_miss(cache, clients, segment):
    """The bit is flipped in the page-locked segment itself, anywhere in the block."""
    keyspace, hashes = open_blocks(clients["shm"], cache.runs.block_bytes), chain(8)
    assert keyspace.store(hashes, cache.blocks(range(8))).stored == 8
    assert keyspace.load(hashes, cache.blocks(range(8, 16))).loaded == 8
    assert cache.wait_pinned(60)
    third = bytes_of(cache)[3]
    for where in (0, cache.runs.block_bytes // 2 + 1, cache.runs.block_bytes - 1):
        names = chain(8)
        assert keyspace.store(names, cache.blocks(range(8))).stored == 8
        harmed = [place + where for place in places_of(segment, third)]
        assert harmed
        segment[harmed] ^= 0x10
        result = keyspace.load(names, cache.blocks(range(16, 24)))
        segment[harmed] ^= 0x10
        assert result.reasons[3] == MissReason.VERIFY_FAILED
        assert [reason for i, reason in enumerate(result.reasons) if i != 3] == [None] * 7


def test_what_is_reported_loaded_is_right_while_slots_are_overwritten(cache, clients, segment):
    """Another thread writes over the slots all the time: a block is right, or it is not reported."""
    client = clients["shm"]
    keyspace, hashes = open_blocks(client, cache.runs.block_bytes), chain(16)
    right = bytes_of(cache)[:16]
    assert keyspace.store(hashes, cache.blocks(range(16))).stored == 16
    places = [place for block in right for place in places_of(segment, block)]
    assert len(places) >= 16
    ended = threading.Event()

    def scribble():
        rng = np.random.default_rng(4)
        while not ended.is_set():
            at = places[rng.integers(len(places))] + rng.integers(cache.runs.block_bytes - 64)
            for _ in range(2):  # harm, and undo it
                segment[at : at + 64] ^= 0xFF

    thread = threading.Thread(target=scribble)
    thread.start()
    loaded = 0
    try:
        for _ in range(12):
            result = keyspace.load(hashes, cache.blocks(range(16, 32)))
            found = bytes_of(cache)[16:]
            for i, reason in enumerate(result.reasons):
                if reason is None:
                    loaded += 1
                    assert np.array_equal(found[i], right[i])
            if result.loaded < 16:  # harm met twice: the copy was reported, and dropped
                hashes = chain(16)
                assert keyspace.store(hashes, cache.blocks(range(16))).stored == 16
    finally:
        ended.set()
        thread.join()
    assert loaded


def test_a_transfer_does_not_wait_for_the_compute_stream(cache, clients, torch):
    """It ends while what computes still runs; and computing is not made to wait either."""
    keyspace, hashes = open_blocks(clients["shm"], cache.runs.block_bytes), chain(8)
    keyspace.store(hashes, cache.blocks(range(8)))
    keyspace.load(hashes, cache.blocks(range(8, 16)))
    assert cache.wait_pinned(60)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4_000_000_000)  # cycles: 2 s
        done.record()
    assert keyspace.store(chain(8), cache.blocks(range(8))).stored == 8
    assert keyspace.load(hashes, cache.blocks(range(16, 24))).loaded == 8
    assert not done.query()
    done.synchronize()


def test_a_save_waits_for_the_kernel_that_writes_its_pages(clients, pages, torch):
    """Row 6 of the fault matrix: a step's hooks are called while the step still runs."""
    memory = torch.zeros((LAYERS, BLOCKS, 64 << 10), dtype=torch.uint8, device="cuda")
    engine = pages.open_pages({f"layer.{i}": memory[i] for i in range(LAYERS)})
    keyspace, hashes = open_blocks(clients["shm"], engine.runs.block_bytes), chain(8)
    found = np.empty((8, engine.runs.block_bytes), np.uint8)
    engine.gather(range(8), found)  # what is built at the first use is not built while the kernel runs
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(4_000_000_000)  # cycles: 2 s
        memory.fill_(7)
        fence = engine.fence()
    engine.gather(range(8), found)
    assert not fence.query()
    assert not found.any(), "nothing is written yet"

    engine.wait(fence)
    assert keyspace.store(hashes, engine.direct(range(8))).stored == 8

    assert keyspace.load(hashes, found).loaded == 8
    assert (found == 7).all()


def test_the_first_that_a_thread_does_may_be_a_load(cache, clients):
    """CUDA's contexts are current by thread; engines load on threads that did nothing before."""
    keyspace, hashes = open_blocks(clients["shm"], cache.runs.block_bytes), chain(8)
    assert keyspace.store(hashes, cache.blocks(range(8))).stored == 8
    keyspace.load(hashes, cache.blocks(range(8, 16)))
    assert cache.wait_pinned(60)
    loaded = []
    thread = threading.Thread(target=lambda: loaded.append(keyspace.load(hashes, cache.blocks(range(16, 24))).loaded))
    thread.start()
    thread.join()
    assert loaded == [8]
    found = bytes_of(cache)
    assert np.array_equal(found[16:24], found[:8])


def test_threads_share_a_cache(cache, clients):
    """Loads and stores from several threads at once, to blocks of their own."""
    keyspace = open_blocks(clients["shm"], cache.runs.block_bytes)
    right, failures = bytes_of(cache), []

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
    found = bytes_of(cache)
    for first in (0, 8, 16, 24):
        assert np.array_equal(found[first + 4 : first + 8], right[first : first + 4])


def test_a_mapping_is_unlocked_when_its_client_closes(cache, pool):
    """Page-locked once for all calls of a client, and not longer than it lives."""
    mappings = importlib.import_module("kvpool.gpu.pinning")._mappings  # needs CuPy
    gc.collect()
    before = set(mappings)
    with kvpool.connect(pool.uri, transports=["shm"]) as client:
        keyspace, hashes = open_blocks(client, cache.runs.block_bytes), chain(4)
        for _ in range(3):
            keyspace.store(hashes, cache.blocks(range(4)))
            assert keyspace.load(hashes, cache.blocks(range(4, 8))).loaded == 4
        assert cache.wait_pinned(60)
        assert len(set(mappings) - before) == 2  # to read and to write
    del client, keyspace
    gc.collect()
    assert set(mappings) == before
