"""The plug-in that vLLM loads: hands each hook to the scheduler's or the worker's half, and lets nothing escape.

An exception in a hook would end the engine. Here it becomes a counted miss: `_guarded` says what is answered then.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool import SettingsError
from kvpool_connector.vllm.config import parse_config
from kvpool_connector.vllm.fingerprint import RankFingerprint, check_hashing
from kvpool_connector.vllm.jobs import StepJobs, WorkerReport
from kvpool_connector.vllm.metrics import KVPoolPromMetrics, KVPoolStats
from kvpool_connector.vllm.scheduler import PoolScheduler
from kvpool_connector.vllm.version import check_version
from kvpool_connector.vllm.worker import PoolWorker, Results

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

check_version(vllm_version)

FOREIGN = "MultiConnector hands on the handshake of its first connector that has one: name kvpool before that one"
Hook = TypeVar("Hook", bound=Callable[..., Any])
log = logging.getLogger("vllm.kvpool")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """`StepJobs`, as vLLM carries it to the workers."""

    jobs: StepJobs


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """`WorkerReport`, as vLLM carries it to the scheduler."""

    report: WorkerReport

    def aggregate(self, other: "ReportMetadata") -> "ReportMetadata":
        """Both workers' reports."""
        return ReportMetadata(self.report.merge(other.report))


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker holds, or why it cannot take part."""

    fingerprint: RankFingerprint | str


def _guarded(otherwise: Callable[[], Any] = lambda: None) -> Callable[[Hook], Hook]:
    """A hook that answers ``otherwise()`` when it fails."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: "KVPoolConnector", *args: Any, **options: Any) -> Any:  # noqa: ANN401 - hooks differ
            try:
                return hook(self, *args, **options)
            except Exception as error:  # noqa: BLE001 - whatever it is, the engine must go on
                self._count_failure(hook.__name__, error)
                return otherwise()

        return call  # type: ignore[return-value]

    return decorate


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """A vLLM engine's connection to a kvpool.

    Raises:
        SettingsError: An impossible setting, or block hashes that other engines cannot reproduce; names the fix.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = parse_config(transfer.kv_connector_extra_config)
        check_hashing(vllm_config)
        self._failures = 0
        self._scheduler: PoolScheduler | None = None
        self._worker: PoolWorker | None = None
        self._results = Results()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = PoolScheduler(vllm_config, kv_cache_config, config)
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    "kvpool: kv_load_failure_policy is %r: a failed load fails its request; set it to 'recompute'",
                    transfer.kv_load_failure_policy,
                )
        else:
            self._worker = PoolWorker(vllm_config, kv_cache_config, config, _rank())

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost costs a future hit, not a request's output."""
        return False

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """See the base class."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._asked.bind(kv_cache_manager)

    @_guarded()
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """See the base class."""
        ours = {rank: said.fingerprint if isinstance(said, Handshake) else FOREIGN for rank, said in metadata.items()}
        self._asked.agree(ours)

    @_guarded()
    def on_new_request(self, request: "Request") -> None:
        """See the base class."""
        self._asked.added(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class. Loads are always asynchronous: vLLM's synchronous ones cannot be recomputed (V8)."""
        tokens = self._asked.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """See the base class. Not guarded: a request whose load is lost here would wait for ever."""
        self._asked.allocated(request, blocks, num_external_tokens)

    @_guarded(lambda: StepMetadata(StepJobs()))
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See the base class."""
        return StepMetadata(self._asked.step(scheduler_output))

    @_guarded()
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See the base class."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            self._asked.came_back(meta.report)

    @_guarded(lambda: (False, None))
    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. Blocks are freed at once: saves hold references of their own."""
        self._asked.finished(request, block_ids)
        return False, None

    @_guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """See the base class."""
        return self._asked.frees_soon()

    @_guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """See the base class."""
        return self._asked.saves_pending()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """See the base class."""
        return self._scheduler.reset() if self._scheduler is not None else None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        self._moves.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """See the base class."""
        return Handshake(self._moves.fingerprint)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002 - vLLM's hook
        """See the base class."""
        self._moves.begin_loads(self._jobs())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole blocks are moved: nothing to do for a layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Whole blocks are moved: nothing to do for a layer."""

    def wait_for_save(self) -> None:
        """See the base class; nothing waits: blocks stay referenced until the scheduler knows that they are saved."""
        self._moves.begin_saves(self._jobs())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class."""
        self._moves.cancel(finished_req_ids)
        self._results = self._moves.take_results(idle=self._jobs().idle)
        return KVConnectorTransferResults(set(), self._results.request_ids, set())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self._results.bad_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base class."""
        report = self._results.report
        self._results = Results()
        return ReportMetadata(report) if report else None

    # Both

    @_guarded()
    def get_kv_connector_stats(self) -> KVPoolStats | None:
        """See the base class."""
        half = self._scheduler or self._worker
        return half.take_stats() if half is not None else None

    def shutdown(self) -> None:
        """See the base class."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPoolStats:
        """See the base class."""
        return KVPoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,  # noqa: ANN401 - vLLM's types
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVPoolPromMetrics:
        """See the base class."""
        return KVPoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ANN401, ARG003 - vLLM 0.33's hook
        """False: the KV cache is not registered anew after a sleep."""
        return False

    @property
    def _asked(self) -> PoolScheduler:
        if self._scheduler is None:
            raise SettingsError("this hook is for the scheduler's side of the connector")
        return self._scheduler

    @property
    def _moves(self) -> PoolWorker:
        if self._worker is None:
            raise SettingsError("this hook is for a worker's side of the connector")
        return self._worker

    def _jobs(self) -> StepJobs:
        metadata = self._get_connector_metadata()
        return metadata.jobs if isinstance(metadata, StepMetadata) else StepJobs()

    def _count_failure(self, hook: str, error: Exception) -> None:
        self._failures += 1
        half = self._scheduler or self._worker
        if half is not None:
            half.stats.count("hook_failures")
        if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th…
            log.error("kvpool: %s failed (%d so far); it counts as a miss", hook, self._failures, exc_info=error)


def _rank() -> tuple[int, int]:
    """This worker's pipeline and tensor rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


__all__ = ["KVPoolConnector"]
