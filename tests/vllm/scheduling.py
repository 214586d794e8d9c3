"""Drives a real vLLM scheduler without an engine: our scheduler half, our worker halves, a real pool, a fake model."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvpool_connector.vllm import connector as connector_module
from kvpool_connector.vllm.connector import KVPoolConnector, StepMetadata
from kvpool_connector.vllm.jobs import LoadJob, SaveJob, StepJobs
from kvpool_connector.vllm.scheduler import PoolScheduler
from tests.vllm.forward import FakeModel, TokenStream
from tests.vllm.shapes import BLOCK, Shape, make_config, make_kv_configs
from tests.waiting import eventually

VOCABULARY = 32_000
IN_FLIGHT_MAX = 2
"""Steps that an engine with asynchronous scheduling has out at a time."""

STUCK_S = 20
"""No test's engine needs as long, however slow the machine: better a failure than a run that never ends."""


class Rank:
    """One worker: its half of the connector, its memory and its model; hooks in the order of model runner V1."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, rank: int) -> None:
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
        layout = KVCacheLayout[str(kv.kv_cache_layout)]
        self.caches = allocate_kv_cache(kv, torch.device("cpu"), layout)
        self.model = FakeModel(self.caches, rank)
        self.connector.register_kv_caches(self.caches)

    def step(self, output: SchedulerOutput, forward: Callable[["Rank"], None]) -> KVConnectorOutput:
        connector = self.connector
        metadata = copy.deepcopy(output.kv_connector_metadata)  # as the executor's queue does
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        assert not output.has_sync_kv_loads, "loads are always asynchronous"
        forward(self)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        reported = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=copy.deepcopy(connector.build_connector_worker_meta()),
        )
        connector.clear_connector_metadata()
        return reported


class Engine:
    """A scheduler, its workers, and the loop of vLLM's engine core around them."""

    def __init__(self, model: Path, shape: Shape) -> None:
        self.shape = shape
        self.config = make_config(model, shape)
        hash_function = get_hash_fn_by_name(shape.algorithm)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        worker_configs, self.kv_config = make_kv_configs(self.config, shape)
        kind = AsyncScheduler if shape.asynchronous else Scheduler
        self.scheduler = kind(
            self.config,
            self.kv_config,
            StructuredOutputManager(self.config),
            block_size=self.kv_config.cache_hit_alignment_tokens,
            hash_block_size=self.kv_config.hash_block_size,
            log_stats=True,
        )
        self.ranks = []
        for i, kv in enumerate(worker_configs):
            connector_module._rank = lambda tensor_rank=i: (0, tensor_rank)
            self.ranks.append(Rank(self.config, kv, i))
        self.connector = self.scheduler.get_kv_connector()
        self._aggregator = KVOutputAggregator.from_connector(self.connector, len(self.ranks))
        self.requests: dict[str, Request] = {}
        """All requests that ever were, by id."""
        self.streams: dict[str, TokenStream] = {}
        self.tables: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.stats: dict[str, Any] = {}
        self.raw_stats: list[dict[str, Any]] = []
        self.recomputed: dict[str, int] = {}
        """Tokens that each request computed itself."""
        self.reported: list[KVConnectorOutput] = []
        self.load_jobs: list[LoadJob] = []
        self.save_jobs: list[SaveJob] = []
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._known: dict[str, int] = {}
        self._names = 0
        self.closed = False

    # Parts of the connector

    @property
    def pool_connector(self) -> KVPoolConnector:
        children = getattr(self.connector, "sub_connectors", [self.connector])
        return next(c for c in children if isinstance(c, KVPoolConnector))

    @property
    def half(self) -> PoolScheduler:
        half = self.pool_connector._scheduler
        assert half is not None
        return half

    def shake_hands(self) -> None:
        handshakes = {(0, i): rank.connector.get_handshake_metadata() for i, rank in enumerate(self.ranks)}
        self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)

    def connect(self) -> "Engine":
        """Exchange the handshake, and wait until the pool is reached."""
        self.shake_hands()
        eventually(self.reached)
        return self

    def reached(self) -> bool:
        return self.half._link is not None and self.half._link.keyspace is not None

    # Requests

    def add(self, prompt: Iterable[int], max_tokens: int = 1, name: str | None = None, **fields: Any) -> str:
        """Add a request; its id."""
        self._names += 1
        name = name or f"r{self._names}"
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, **fields.pop("sampling", {})}
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**sampling),
            pooling_params=None,
            block_hasher=self._hasher,
            **fields,
        )
        self.streams[name] = TokenStream(list(prompt), self.shape.weights, VOCABULARY)
        self.outputs[name], self.recomputed[name] = [], 0
        self.requests[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def chain(self, name: str) -> list[bytes]:
        """Hashes of the request's full blocks."""
        return list(self.requests[name].block_hashes)

    def expected_output(self, name: str, tokens: int) -> list[int]:
        """What the request generates without a pool."""
        stream = self.streams[name]
        stream.reach(stream.prompt_tokens + tokens)
        return stream.tokens[stream.prompt_tokens : stream.prompt_tokens + tokens]

    # Steps

    def step(self) -> SchedulerOutput:
        """One step of the engine's loop; with asynchronous scheduling the output of an earlier one comes back."""
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._execute(output)))
        if not self.shape.asynchronous or len(self._in_flight) >= IN_FLIGHT_MAX:
            self.come_back()
        return output

    def come_back(self) -> None:
        """The oldest step's output reaches the scheduler."""
        output, result = self._in_flight.popleft()
        for core_outputs in self.scheduler.update_from_output(output, result).values():
            for one in core_outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finish_reasons[one.request_id] = str(one.finish_reason)
            if core_outputs.scheduler_stats is not None:
                self._count(core_outputs.scheduler_stats.kv_connector_stats or {})

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until the condition holds; by default until the engine has nothing left to do."""
        pause, stuck_s = threading.Event(), time.monotonic() + STUCK_S
        while not (until() if until is not None else self.idle()):
            assert time.monotonic() < stuck_s, f"the engine is stuck: {self.scheduler.requests}, {self.stats}"
            if not self.step().total_num_scheduled_tokens:
                pause.wait(0.002)  # only other threads can go on
        if until is None:
            while self._in_flight:
                self.come_back()

    def run_unchecked(self) -> None:
        """As `run`, for models whose pages the fake model does not know: nothing is computed."""
        self._forward = lambda rank, work: [self.streams[name].reach(end) for name, _, end in work]
        self.run()

    def idle(self) -> bool:
        return not self.scheduler.has_requests() and not self._in_flight_work()

    def _in_flight_work(self) -> bool:
        return any(output.total_num_scheduled_tokens for output, _ in self._in_flight)

    def generate(self, prompt: Iterable[int], max_tokens: int = 1, **fields: Any) -> str:
        """Add a request and run until nothing is left; its id."""
        name = self.add(prompt, max_tokens, **fields)
        self.run()
        return name

    def count(self, name: str) -> float:
        """A counter of the connector, since the start."""
        return self.stats.get(name, 0)

    def _count(self, stats: dict[str, Any]) -> None:
        if stats:
            self.raw_stats.append(stats)
        stats = stats.get("data", stats)
        stats = stats.get("KVPoolConnector", stats)
        for name, value in stats.get("data", stats).items():
            self.stats[name] = self.stats[name] + value if name in self.stats else value

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        jobs = _step_jobs(output)
        self.load_jobs += jobs.loads
        self.save_jobs += jobs.saves
        work = self._take_work(output)
        sampled = [self._sampled(name, end) for name, _, end in work]
        results = []
        for rank in self.ranks:
            reported = rank.step(output, lambda rank: self._forward(rank, work))
            result = ModelRunnerOutput(
                req_ids=[name for name, _, _ in work],
                req_id_to_index={name: i for i, (name, _, _) in enumerate(work)},
                sampled_token_ids=sampled,
                kv_connector_output=reported,
            )
            results.append(result)
        result = self._aggregator.aggregate(results) if len(results) > 1 else results[0]
        self.reported.append(result.kv_connector_output)
        return result

    def _take_work(self, output: SchedulerOutput) -> list[tuple[str, int, int]]:
        """(request, first position, end) of what is to be computed; block tables are kept as model runner V1 does."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self._known[new.req_id] = len(new.prompt_token_ids or ())
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
                self._known[name] = len(cached.all_token_ids[name])
            self.tables[name] += blocks[0] if blocks else []
            computed[name] = tokens
        for name in output.finished_req_ids:
            self.tables.pop(name, None)
        return [(name, computed[name], computed[name] + n) for name, n in output.num_scheduled_tokens.items()]

    def _forward(self, rank: Rank, work: list[tuple[str, int, int]]) -> None:
        for name, first, end in work:
            stream, table = self.streams[name], self.tables[name]
            stream.reach(end)
            rank.model.write(stream, table, first, end)
            wrong = rank.model.wrong_positions(stream, table, end)
            assert not wrong, f"{name} attends over wrong bytes at {wrong[:8]}… of {end} tokens"
            if rank is self.ranks[0]:
                self.recomputed[name] += end - first

    def _sampled(self, name: str, end: int) -> list[int]:
        """The next token, where the step reached the last one that this worker knows."""
        if end < self._known[name]:
            return []
        self.streams[name].reach(end)
        self._known[name] = end + 1
        return [self.streams[name].next_token(end - 1)]

    # The end

    def drain(self) -> None:
        """Steps until requests and saves have ended, then everything must be as it was at the start."""
        self.run()
        self.check_nothing_leaked()

    def check_nothing_leaked(self) -> None:
        scheduler, half = self.scheduler, self.half
        assert not scheduler.requests
        assert not scheduler.running
        assert not len(scheduler.waiting)
        assert not len(scheduler.kv_holding_waiting)
        assert not scheduler.deferred_waiting
        assert not scheduler.finished_recving_kv_req_ids
        assert not scheduler.failed_recving_kv_req_ids
        assert not scheduler.deferred_frees
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.kv_config.num_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        half.book.check_integrity()
        half.saver.book.check_integrity()
        assert (len(half.book), half.book.loads, len(half.saver.book), half.saver.book.pinned_blocks) == (0, 0, 0, 0)
        assert not half._live
        assert not half._ready_loads
        for rank in self.ranks:
            assert not rank_worker(rank)._running
            assert not rank_worker(rank)._cancelled

    def close(self) -> None:
        """Shut both halves down, twice: that must be harmless."""
        if not self.closed:
            self.closed = True
            for _ in range(2):
                self.scheduler.shutdown()
                for rank in self.ranks:
                    rank.connector.shutdown()


def _step_jobs(output: SchedulerOutput) -> StepJobs:
    metadata = output.kv_connector_metadata
    children = getattr(metadata, "metadata", [metadata])
    return next(child.jobs for child in children if isinstance(child, StepMetadata))


def rank_worker(rank: Rank) -> Any:
    """The rank's `PoolWorker`."""
    children = getattr(rank.connector, "sub_connectors", [rank.connector])
    return next(c for c in children if isinstance(c, KVPoolConnector))._worker
