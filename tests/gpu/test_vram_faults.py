"""Nodes that go away while clients have their GPU memory mapped: right blocks or misses, and the client lives on."""

import os
import signal
import threading

import numpy as np
import pytest

from tests.gpu.conftest import chain, node_gpu, open_blocks
from tests.gpu.test_vram import make_cache
from tests.waiting import eventually

COUNT = 64


@pytest.mark.parametrize("which", ["peer", "own"])
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_node_that_ends_while_it_is_read_and_its_next_start(cupy, start_vram_pool, which, end):
    pool = start_vram_pool(vram="64MiB", device=node_gpu(cupy, which))
    cache, memory = make_cache(cupy, 64 << 10, 8, 2 * COUNT)
    right = memory.get()[:, :COUNT]
    keyspace, hashes = open_blocks(pool.connect("cuda"), cache.runs.block_bytes), chain(COUNT)
    assert keyspace.store(hashes, cache.blocks(range(COUNT))).stored == COUNT
    ended, loads, wrong = threading.Event(), [], []

    def read():
        while not ended.is_set():
            result = keyspace.load(hashes, cache.blocks(range(COUNT, 2 * COUNT)))
            found = memory.get()[:, COUNT:]
            good = [i for i, reason in enumerate(result.reasons) if reason is None]
            wrong.extend(i for i in good if not np.array_equal(found[:, i], right[:, i]))
            loads.append(result.loaded)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        eventually(lambda: len(loads) > 3)
        if end == "killed":
            os.kill(pool.node.pid, signal.SIGKILL)
        pool.node.stop()
        so_far = len(loads)
        eventually(lambda: (len(loads) > so_far + 3 and loads[-1] == 0) or not thread.is_alive())
    finally:
        ended.set()
        thread.join()
    assert not wrong
    assert (loads[0], loads[-1]) == (COUNT, 0)

    pool.start_node()
    names = chain(COUNT)
    eventually(lambda: keyspace.store(names, cache.blocks(range(COUNT))).refused == 0)
    assert keyspace.match(hashes).blocks == 0, "what lay in GPU memory went with the process"
    memory[:, COUNT:] = 0
    cupy.cuda.runtime.deviceSynchronize()
    assert keyspace.load(names, cache.blocks(range(COUNT, 2 * COUNT))).loaded == COUNT
    assert np.array_equal(memory.get()[:, COUNT:], right)
