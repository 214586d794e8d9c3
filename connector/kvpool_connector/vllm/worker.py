"""A worker's half: loads and saves its shard of blocks on background threads, and reports each job exactly once.

Copies and checksums release the interpreter lock, so the engine's own thread goes on meanwhile. A load is reported as
done only when its bytes were verified and lie in the engine's pages; whatever else happens, it is reported as failed.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvpool import Keyspace, LoadResult, Reservation, Want
from kvpool.core.limits import HASH_BYTES
from kvpool.core.namespace import parse_namespace
from kvpool_connector.vllm.config import ConnectorConfig
from kvpool_connector.vllm.fingerprint import RankFingerprint, rank_fingerprint, shard_of
from kvpool_connector.vllm.jobs import LoadJob, LoadReport, SaveJob, SaveReport, StepJobs, WorkerReport
from kvpool_connector.vllm.link import PoolLink
from kvpool_connector.vllm.metrics import KVPoolStats
from kvpool_connector.vllm.pages import Bytes, Pages, UnsupportedLayoutError, open_pages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

IDLE_WAIT_S = 0.004
"""How long an idle step waits for a job to end: the most by which it can delay a request that comes meanwhile."""

NICE = 10
"""Of threads that move blocks. On 2 cores a decode step beside a load took 1.25 times as long without, 1.04 with."""

SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs"})
"""Groups whose every full block is needed, and whose prefix is a hit."""

log = logging.getLogger("vllm.kvpool")


@dataclass(slots=True)
class Results:
    """What ended since the last step.

    Attributes:
        request_ids: Requests whose load has ended, well or not.
        bad_blocks: Engine blocks that were to be loaded and were not.
        report: For the scheduler's half.
    """

    request_ids: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    report: WorkerReport = field(default_factory=WorkerReport)


class PoolWorker:
    """One rank's worker side. vLLM calls it from its main thread; jobs run on threads of its own.

    Args:
        vllm_config: The engine's configuration.
        kv_cache_config: This worker's KV cache.
        config: The connector's settings.
        rank: Pipeline and tensor rank.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: ConnectorConfig,
        rank: tuple[int, int],
    ) -> None:
        self.stats = KVPoolStats()
        self.fingerprint: RankFingerprint | str = "the KV caches were not registered"
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        parallel = vllm_config.parallel_config
        self._rank = rank[0] * parallel.tensor_parallel_size + rank[1]
        self._ranks = frozenset({self._rank})
        self._shard, self._writes = shard_of(rank, parallel.tensor_parallel_size, kv_cache_config.kv_tp_replicas)
        self._principal = f"vllm:{str(vllm_config.kv_transfer_config.engine_id)[:8]}:{rank[0]}.{rank[1]}"
        self._pages: Pages | None = None
        self._link: PoolLink | None = None
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._results = Results()
        self._saving = 0
        self._running: dict[int, LoadJob] = {}
        self._cancelled: set[int] = set()
        self._staging = threading.local()
        self._loads = ThreadPoolExecutor(config.load_threads, "kvpool-load", initializer=_set_up_thread)
        self._saves = ThreadPoolExecutor(config.save_threads, "kvpool-save", initializer=_set_up_thread)

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV cache; what cannot be used is said in `fingerprint`."""
        reason = unsupported(self._vllm_config, self._kv_cache_config)
        if reason:
            self.fingerprint = reason
            return
        try:
            self._pages = open_pages(caches)
        except UnsupportedLayoutError as error:
            self.fingerprint = str(error)
            return
        device = next(iter(caches.values())).device
        self.fingerprint = rank_fingerprint(self._vllm_config, self._kv_cache_config, self._pages.runs, device)

    def begin_loads(self, step: StepJobs) -> None:
        """Start this step's loads."""
        if step.timed_step:
            with self._lock:
                self._results.report = self._results.report.merge(WorkerReport(timed_step=step.timed_step))
        for job in step.loads:
            with self._lock:
                self._running[job.number] = job
            try:
                self._use(step.namespace)
                self._loads.submit(self._load, job, self._fence(), time.monotonic())
            except Exception as error:
                log.exception("kvpool: load %d could not begin", job.number)
                self._load_ended(job, 0, f"{type(error).__name__}: {error}", 0.0)

    def begin_saves(self, step: StepJobs) -> None:
        """Start this step's saves; the steps that compute their blocks have been launched."""
        with self._lock:
            self._saving += len(step.saves)
        for job in step.saves:
            try:
                self._use(step.namespace)
                self._saves.submit(self._save, job, self._fence(), time.monotonic())
            except Exception:
                log.exception("kvpool: save %d could not begin", job.number)
                self._save_ended(
                    job, SaveReport(self._ranks, frozenset(_wanted(job)), crowded=False, size_bytes=0, elapsed_s=0.0)
                )

    def cancel(self, request_ids: set[str]) -> None:
        """Requests have left: their loads end as soon as they can, and are still reported."""
        if request_ids and self._running:
            with self._lock:
                self._cancelled.update(n for n, job in self._running.items() if job.request_id in request_ids)

    def take_results(self, *, idle: bool = False) -> Results:
        """What ended since the last call; each job once.

        With ``idle`` it waits a moment where there is nothing yet: vLLM steps on while a request waits for its load,
        and would keep two processes busy with steps that do nothing.
        """
        with self._ended:
            if idle and not self._results.report and (self._running or self._saving):
                self._ended.wait(IDLE_WAIT_S)
            taken, self._results = self._results, Results()
        return taken

    def take_stats(self) -> KVPoolStats | None:
        """Counts since the last call."""
        with self._lock:
            if self.stats.is_empty():
                return None
            taken, self.stats = self.stats, KVPoolStats()
        return taken

    def close(self) -> None:
        """End all jobs and the connection. Idempotent, bounded by the calls in flight."""
        link, self._link = self._link, None
        with self._lock:
            self._cancelled.update(self._running)
        if link is not None:
            link.close()
        self._loads.shutdown(cancel_futures=True)
        self._saves.shutdown(cancel_futures=True)

    def _use(self, document: bytes) -> None:
        """Jobs are of this namespace: open it, where it is another one than so far."""
        if not document or (self._link is not None and self._link.namespace.document == document):
            return
        if self._link is not None:
            self._link.close()
        self._link = PoolLink(self._config, parse_namespace(document), self._principal)

    # Loads

    def _load(self, job: LoadJob, fence: Any, arrived_s: float) -> None:  # noqa: ANN401 - see Pages.fence
        loaded, reason = 0, ""
        try:
            if job.hashes:
                loaded, reason = self._load_steps(job, fence, arrived_s + self._config.load_timeout_s)
            else:
                reason = "it was not known which blocks to load"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("kvpool: load %d of request %s failed", job.number, job.request_id)
        self._load_ended(job, loaded, reason, time.monotonic() - arrived_s)

    def _load_ended(self, job: LoadJob, loaded: int, reason: str, elapsed_s: float) -> None:
        wanted, size_bytes = len(job.blocks), loaded * self._block_bytes
        report = LoadReport(None if loaded == wanted else loaded, reason, size_bytes, elapsed_s, self._rank)
        with self._lock:
            self._running.pop(job.number, None)
            self._cancelled.discard(job.number)
            self._results.request_ids.add(job.request_id)
            self._results.bad_blocks.update(job.blocks[loaded:])
            self._results.report = self._results.report.merge(WorkerReport(loads={job.number: [report]}))
            self._ended.notify()
            self.stats.count("load_bytes", size_bytes)
            self.stats.observe("load_seconds", elapsed_s)

    def _load_steps(self, job: LoadJob, fence: Any, deadline_s: float) -> tuple[int, str]:  # noqa: ANN401
        """Leading blocks of the job that are loaded, and why the next one is not."""
        link, pages = self._link, self._pages
        assert pages is not None
        keyspace = link.wait(deadline_s - time.monotonic()) if link is not None else None
        if keyspace is None:
            return 0, "the pool is not reached"
        pages.wait(fence)
        with keyspace.tracer.span("kvpool.vllm.load", request_id=job.request_id, blocks=len(job.blocks)) as span:
            loaded, reason = self._load_from(keyspace, pages, job, deadline_s)
            span.set(loaded_blocks=loaded, miss_reason=reason)
        return loaded, reason

    def _load_from(self, keyspace: Keyspace, pages: Pages, job: LoadJob, deadline_s: float) -> tuple[int, str]:
        step = max(1, pages.step_bytes // self._block_bytes)
        for start in range(0, len(job.blocks), step):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or job.number in self._cancelled:
                return start, "over_deadline" if left_s <= 0 else "cancelled"
            some = job.blocks[start : start + step]
            first = job.first + start
            hashes = job.hashes[: (first + len(some)) * HASH_BYTES]
            result = self._load_some(keyspace, pages, hashes, some, first, left_s)
            if result.loaded < len(some):
                return start + result.loaded, str(result.reasons[result.loaded])
        return len(job.blocks), ""

    def _load_some(
        self, keyspace: Keyspace, pages: Pages, hashes: bytes, blocks: list[int], first: int, left_s: float
    ) -> LoadResult:
        direct = pages.direct(blocks)
        if direct is not None:
            return keyspace.load(hashes, direct, first=first, shard=self._shard, timeout_s=left_s)
        staging = self._staged(pages.step_bytes)[: len(blocks)]
        result = keyspace.load(hashes, staging, first=first, shard=self._shard, timeout_s=left_s)
        if result.loaded:
            pages.scatter(blocks[: result.loaded], staging[: result.loaded])
        return result

    # Saves

    def _save(self, job: SaveJob, fence: Any, arrived_s: float) -> None:  # noqa: ANN401 - see Pages.fence
        wanted = _wanted(job)
        failed, crowded, size_bytes = frozenset(wanted), False, 0
        try:
            if not self._writes:
                failed = frozenset()  # another rank holds the same bytes, and writes them
            else:
                left_s = arrived_s + self._config.save_timeout_s - time.monotonic()
                written = self._write(job, wanted, fence, left_s) if left_s > 0 else None
                if written is not None:
                    failed, crowded = frozenset(wanted).difference(written[0]), written[1]
                    size_bytes = len(written[0]) * self._block_bytes
        except Exception:
            log.exception("kvpool: save %d failed", job.number)
        self._save_ended(job, SaveReport(self._ranks, failed, crowded, size_bytes, time.monotonic() - arrived_s))

    def _save_ended(self, job: SaveJob, report: SaveReport) -> None:
        with self._lock:
            self._saving -= 1
            self._results.report = self._results.report.merge(WorkerReport(saves={job.number: report}))
            self._ended.notify()
            self.stats.count("save_bytes", report.size_bytes)
            self.stats.observe("save_seconds", report.elapsed_s)

    def _write(self, job: SaveJob, wanted: list[int], fence: Any, left_s: float) -> tuple[tuple[int, ...], bool] | None:  # noqa: ANN401
        """Write the wanted blocks; indexes of those committed, and whether a node was crowded."""
        link, pages = self._link, self._pages
        assert pages is not None
        keyspace = link.wait(left_s) if link is not None else None
        if keyspace is None:
            return None
        pages.wait(fence)
        with keyspace.tracer.span("kvpool.vllm.save", reservation=job.reservation.number, blocks=len(wanted)):
            return self._write_from(keyspace, pages, job, wanted, left_s)

    def _write_from(
        self, keyspace: Keyspace, pages: Pages, job: SaveJob, wanted: list[int], left_s: float
    ) -> tuple[tuple[int, ...], bool]:
        direct = pages.direct(job.blocks)
        if direct is not None:
            written = keyspace.write(job.reservation, direct, shard=self._shard, timeout_s=left_s)
            return written.committed, written.crowded
        staging = self._staged(len(wanted) * self._block_bytes)[: len(wanted)]
        pages.gather([job.blocks[i] for i in wanted], staging)
        return _write_wanted(keyspace, job.reservation, staging, wanted, self._shard, left_s)

    def _fence(self) -> Any:  # noqa: ANN401 - see Pages.fence
        return self._pages.fence() if self._pages is not None else None

    @property
    def _block_bytes(self) -> int:
        return self._pages.runs.block_bytes if self._pages else 1

    def _staged(self, size_bytes: int) -> Bytes:
        """This thread's staging memory, shape (blocks, block_bytes), of about ``size_bytes`` and at least one block."""
        blocks = max(1, size_bytes // self._block_bytes)
        held: Bytes | None = getattr(self._staging, "memory", None)
        if held is None or len(held) < blocks:
            held = self._staging.memory = np.empty((blocks, self._block_bytes), np.uint8)
        return held


def _wanted(job: SaveJob) -> list[int]:
    """Indexes of the blocks that the reservation has places for."""
    return [i for i, want in enumerate(job.reservation.wants) if want == Want.WANTED]


def unsupported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Why the engine's blocks cannot be pooled yet; empty when they can."""
    groups = kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    if len(groups) != 1:
        return f"models with {len(groups)} KV cache groups (hybrids) are not supported yet: no hits, no saves"
    spec = type(groups[0].kv_cache_spec).__name__
    if tuple(kv_cache_config.prefix_cacheable_group_ids) != (0,):
        return f"its KV cache ({spec}) cannot be cached by prefix"
    if spec not in SPECS:
        return f"{spec} is not supported yet: only full attention is"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is not supported yet"
    return ""


def _write_wanted(
    keyspace: Keyspace, reservation: Reservation, staging: Bytes, wanted: list[int], shard: int, timeout_s: float
) -> tuple[tuple[int, ...], bool]:
    """Write a reservation of which only some blocks are wanted, from rows that hold just these."""
    blocks = len(reservation.wants)
    if len(wanted) == blocks:
        written = keyspace.write(reservation, staging, shard=shard, timeout_s=timeout_s)
    else:
        rows: list[Bytes] = [staging[0]] * blocks  # what is not wanted is not read
        for row, block in enumerate(wanted):
            rows[block] = staging[row]
        written = keyspace.write(reservation, rows, shard=shard, timeout_s=timeout_s)
    return written.committed, written.crowded


def _set_up_thread() -> None:
    """Let a thread that moves blocks use all cores, but those that compute first.

    vLLM's CPU back end binds a worker's main thread to one core, and threads inherit that. There all cores compute, and
    a step is as slow as its slowest core; elsewhere cores are free, and being last in line for them costs nothing.
    """
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
