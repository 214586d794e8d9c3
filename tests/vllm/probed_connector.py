"""The connector as it is, with a window: tests see what it holds and moves, and stop it at chosen points.

vLLM loads it by module path. Each process of the engine with a half of the connector answers on a Unix socket in the
folder that ``KVPOOL_PROBE`` names. A file ``hold-load`` there stops loads before they begin, ``hold-scatter`` after
each step of theirs, and ``hold-save`` saves before they read the engine's memory.
"""

import json
import os
import socket
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from kvpool import Want
from kvpool.core.keys import split_hashes
from kvpool_connector.vllm.connector import KVPoolConnector
from kvpool_connector.vllm.pages import Pages
from tests.vllm.engines import digest

HOLDS = ("load", "scatter", "save")


class Watch:
    """What a worker moved, by hash, and who waits at a hold."""

    def __init__(self, folder):
        self.saved = {}
        self.loaded = {}
        self.held = Counter()
        self.doing = threading.local()
        self._folder = folder
        self._lock = threading.Lock()

    def begins(self, hashes):
        self.doing.hashes = iter(hashes)

    def moved(self, book, rows):
        with self._lock:
            for row in rows:
                book[next(self.doing.hashes).hex()] = digest(row)

    def pass_hold(self, kind):
        path = self._folder / f"hold-{kind}"
        if not path.exists():
            return
        with self._lock:
            self.held[kind] += 1
        pause = threading.Event()
        while path.exists():
            pause.wait(0.005)
        with self._lock:
            self.held[kind] -= 1

    def state(self):
        with self._lock:
            return {"saved": dict(self.saved), "loaded": dict(self.loaded), "held": dict(self.held)}


class WatchedPages(Pages):
    """The engine's pages; what was scattered is read back from them."""

    def __init__(self, pages, watch):
        super().__init__(pages.runs)
        self._pages = pages
        self._watch = watch

    def gather(self, blocks, out):
        self._pages.gather(blocks, out)
        self._watch.moved(self._watch.saved, out[: len(blocks)])

    def scatter(self, blocks, data):
        self._pages.scatter(blocks, data)
        back = np.empty_like(data)
        self._pages.gather(blocks, back)
        self._watch.moved(self._watch.loaded, back)
        self._watch.pass_hold("scatter")

    def fence(self):
        return self._pages.fence()

    def wait(self, fence):
        self._watch.pass_hold("load" if threading.current_thread().name.startswith("kvpool-load") else "save")
        self._pages.wait(fence)


class ProbedConnector(KVPoolConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        folder = Path(os.environ["KVPOOL_PROBE"])
        if "KVPOOL_PROBE_LOAD_STEP" in os.environ:
            Pages.step_bytes = int(os.environ["KVPOOL_PROBE_LOAD_STEP"])
        self._totals = Counter()
        self._totals_lock = threading.Lock()
        super().__init__(vllm_config, role, kv_cache_config)
        half = "scheduler" if self._scheduler is not None else "worker"
        state = self._scheduler_state if self._scheduler is not None else self._worker_state
        self._watch = Watch(folder)
        threading.Thread(target=_answer, args=(folder / f"{half}.sock", state), daemon=True, name="probe").start()

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        if self._scheduler._gate is not None:  # these loads are slow on purpose, and are to be tried again all the same
            self._scheduler._gate.worth_loading = lambda blocks: True

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        worker = self._worker
        worker._pages = WatchedPages(worker._pages, self._watch)
        load_steps, write = worker._load_steps, worker._write

        def watched_load_steps(job, *args):
            self._watch.begins(split_hashes(job.hashes)[job.first :])
            return load_steps(job, *args)

        def watched_write(job, wanted, *args):
            hashes = split_hashes(job.reservation.hashes)
            assert all(job.reservation.wants[i] == Want.WANTED for i in wanted)
            self._watch.begins([hashes[i] for i in wanted])
            return write(job, wanted, *args)

        worker._load_steps, worker._write = watched_load_steps, watched_write

    def get_kv_connector_stats(self):
        with self._totals_lock:
            stats = super().get_kv_connector_stats()
            if stats is not None:
                self._totals.update(_numbers(stats))
            return stats

    def _common_state(self, half, link):
        with self._totals_lock:
            counts = self._totals + Counter(_numbers(half.stats))
        client = link._client if link is not None else None
        return {
            "counts": counts,
            "hook_failures": self._failures,
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "reached": client is not None,
            "loaded_bytes": client.stats().loaded_bytes if client else {},
            "stored_bytes": client.stats().stored_bytes if client else {},
            "verify_failures": client.stats().verify_failures if client else 0,
        }

    def _scheduler_state(self):
        asked = self._scheduler
        pool = asked._manager.block_pool
        return {
            **self._common_state(asked, asked._link),
            # The null block is never free.
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(asked.book) + len(asked._live),
            "loads": asked.book.loads + len(asked._ready_loads),
            "saves": len(asked.saver.book) + len(asked.saver._ready),
            "pinned_blocks": asked.saver.book.pinned_blocks,
            "namespace": asked.namespace.id.hex() if asked.namespace else "",
        }

    def _worker_state(self):
        worker = self._worker
        return {
            **self._common_state(worker, worker._link),
            **self._watch.state(),
            "loads": len(worker._running),
            "cancelled": len(worker._cancelled),
        }


def _numbers(stats):
    return {name: value for name, value in stats.data.items() if not isinstance(value, list)}


def _answer(path, state):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            peer, _ = listener.accept()
            with peer:
                try:
                    reply = state()
                except Exception as error:  # noqa: BLE001 - read beside the engine's loop: asked again
                    reply = {"busy": repr(error)}
                peer.sendall(json.dumps(reply).encode())
