"""The scheduler's half: asks the pool before blocks are allocated, and decides what the workers load and save.

It runs on the engine's loop, so nothing here waits longer than its share of a step (`ConnectorConfig.step_budget_s`).
What is known of requests and saves lives in `RequestBook` and `SaveBook`; this shell feeds them and acts on them.
"""

import logging
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvpool import Namespace, PoolStatus
from kvpool.core.limits import MATCH_BLOCKS_MAX, RESERVE_BLOCKS_MAX
from kvpool_connector.local_node import ensure_local_node
from kvpool_connector.vllm.calls import Answered, PoolCalls
from kvpool_connector.vllm.config import ConnectorConfig
from kvpool_connector.vllm.fingerprint import DisagreementError, RankFingerprint, agree, explain
from kvpool_connector.vllm.gate import Gate, StepTimer
from kvpool_connector.vllm.jobs import LoadJob, LoadReport, StepJobs, WorkerReport
from kvpool_connector.vllm.link import PoolLink
from kvpool_connector.vllm.metrics import KVPoolStats
from kvpool_connector.vllm.requests import RequestBook, Wait
from kvpool_connector.vllm.saver import Saver
from kvpool_connector.vllm.saves import SaveBook

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SAVE_JOB_BYTES = 16 << 20
"""A save's blocks are gathered, written and let go together; several go side by side."""

FREES_SOON_S = 0.2
"""A save younger than this makes the engine wait for its blocks instead of preempting a request."""

log = logging.getLogger("vllm.kvpool")


class PoolScheduler:
    """One engine's scheduler side. Not thread-safe: vLLM calls it from its loop alone.

    Args:
        vllm_config: The engine's configuration.
        kv_cache_config: Its KV cache groups.
        config: The connector's settings.
    """

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: ConnectorConfig) -> None:
        self.stats = KVPoolStats()
        self._config = config
        self._role = vllm_config.kv_transfer_config.kv_role
        self._group = kv_cache_config.kv_cache_groups[0] if kv_cache_config.kv_cache_groups else None
        self._hash_tokens = kv_cache_config.hash_block_size
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        pinned_max = int(config.save_pinned_fraction * kv_cache_config.num_blocks)
        self.book = RequestBook(time.monotonic, config.lookup_timeout_s, config.lease_s)
        saves = SaveBook(time.monotonic, pinned_max, config.save_timeout_s)
        self.saver = Saver(self.book, saves, self._count)
        self._live: dict[str, Request] = {}
        self._timer = StepTimer(time.monotonic)
        self._budget_s = config.step_budget_s
        self._ready_loads: list[LoadJob] = []
        self._manager: KVCacheManager | None = None
        self._ranks = 0
        self._namespace: Namespace | None = None
        self._gate: Gate | None = None
        self._link: PoolLink | None = None
        self._calls: PoolCalls | None = None

    # Binding

    def bind(self, manager: "KVCacheManager") -> None:
        """Keep the cache manager: saves reference its blocks."""
        self._manager = manager
        self.saver.bind(manager.block_pool)

    def agree(self, ranks: Mapping[tuple[int, int], RankFingerprint | str]) -> None:
        """All workers have said what they hold, or why they cannot take part; opens the pool, or says why not."""
        reasons = {found for found in ranks.values() if isinstance(found, str)}
        if reasons:
            log.warning("kvpool is not used by this engine: %s", "; ".join(sorted(reasons)))
            return
        try:
            namespace = agree({rank: f for rank, f in ranks.items() if not isinstance(f, str)}, self._config)
        except DisagreementError as error:
            log.warning("kvpool is not used by this engine: %s", error)
            return
        self._ranks = len(ranks)
        self._gate = Gate(time.monotonic, namespace.block_bytes * namespace.shards, namespace.block_tokens)
        self.saver.job_blocks = max(1, min(SAVE_JOB_BYTES // namespace.block_bytes, RESERVE_BLOCKS_MAX))
        self._open(namespace)

    @property
    def namespace(self) -> Namespace | None:
        """The namespace that the ranks agreed on."""
        return self._namespace

    def shutdown(self) -> None:
        """Close the way to the pool. Idempotent, bounded."""
        calls, link = self._calls, self._link
        self._calls = self._link = None
        if calls is not None:
            calls.close()
        if link is not None:
            link.close()
        self.saver.drop_unsent()

    def reset(self) -> bool:
        """Never match again what was saved so far (the weights have changed); other namespaces stay.

        Returns:
            False while loads of the old blocks are under way: reset again when they have ended.
        """
        if self._namespace is None:
            return True
        self.shutdown()
        self.book.forget_lookups({name for name, request in self._live.items() if request.num_computed_tokens})
        # A number would meet the blocks of an engine that counted as far with other weights.
        extra = self._namespace.extra | {"reset": secrets.token_hex(8)}
        self._open(msgspec.structs.replace(self._namespace, extra=extra))
        return not self.book.loads

    # Asking

    def added(self, request: "Request") -> None:
        """A request has come: ask the pool at once, so that the answer is there when its turn comes."""
        if self._calls is None or request.request_id in self._live:
            return
        self._live[request.request_id] = request
        self.book.added(request.request_id)
        if self._role != "kv_producer":
            self._look_up(request, self._chain(request))

    def matched_tokens(self, request: "Request", local_tokens: int) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None: ask again in the next step."""
        if self._calls is None or self._role == "kv_producer":
            return 0
        self.added(request)
        chain, local_blocks = self._chain(request), local_tokens // self._block_tokens
        self._look_up(request, chain)
        self._take_answers()
        offer = self.book.offer(request.request_id, chain, local_blocks)
        while offer is Wait.LOOKUP and self._wait_for_answer():
            offer = self.book.offer(request.request_id, chain, local_blocks)
        if isinstance(offer, Wait):
            return None
        if request.skip_reading_prefix_cache:
            offer = 0
        if self._eagle:
            offer = max(0, offer - 1)  # the drafter needs the hidden states of the block before the first new token
        if offer and self._gate is not None and not self._gate.worth_loading(offer):
            self.stats.count("gated_tokens", offer * self._block_tokens)
            offer = 0
        if not offer:
            self.book.withdraw(request.request_id)
        return offer * self._block_tokens

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """The request has its blocks; ``external_tokens`` of them are to be loaded."""
        if not external_tokens and self._calls is None:
            return
        job = self.book.allocated(
            request.request_id,
            self._chain(request),
            blocks.get_block_ids()[0],
            external_tokens // self._block_tokens,
            self._ranks,
        )
        if job is None:
            self._release(self.book.take_lease(request.request_id))
        else:
            self._ready_loads.append(job)

    # Steps

    def step(self, output: "SchedulerOutput") -> StepJobs:
        """A step goes out, with what has become ready; its full blocks are planned to be saved."""
        self._budget_s = self._config.step_budget_s
        if self._namespace is None:
            return StepJobs()
        timed = self._timer.sent(output.total_num_scheduled_tokens)
        self._take_answers()
        try:
            if self._role != "kv_consumer":
                self._plan_saves(output)
            if self._calls is not None:
                self.saver.take_reservations(self._calls, self._table)
        except Exception:  # loads go out whatever becomes of saves: their requests wait for them
            self.stats.count("hook_failures")
            log.exception("kvpool: saves could not be planned")
        loads, self._ready_loads = self._ready_loads, []
        saves = self.saver.take_ready()
        document = self._namespace.document if loads or saves else b""
        return StepJobs(document, loads, saves, timed, idle=not output.total_num_scheduled_tokens)

    def came_back(self, report: WorkerReport | None) -> None:
        """A step's output is here, with what has ended on the workers."""
        if report is None:
            return
        if self._gate is not None and report.timed_step:
            self._gate.prefill.measured(*self._timer.came_back(report.timed_step))
        for number, reports in report.loads.items():
            for rank in reports:
                self._load_reported(number, rank)
        for number, saved in report.saves.items():
            self.saver.reported(self._calls, number, saved, self._ranks)

    def finished(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """A request leaves, in whatever state; what it computed is saved, unless its load had not ended."""
        if self._live.pop(request.request_id, None) is None:
            return
        try:
            if block_ids and self._calls is not None and self._role != "kv_consumer":
                computed = min(request.num_computed_tokens, request.num_tokens)
                chain = self._chain_saved(request, computed)
                self.saver.save(self._calls, chain, request.request_id, block_ids[0], last=True)
        finally:
            self._release(self.book.finished(request.request_id))

    def frees_soon(self) -> bool:
        """Whether saves will let blocks go in a moment."""
        return self.saver.book.younger_than(FREES_SOON_S)

    def saves_pending(self) -> bool:
        """Whether an idle engine must go on stepping for saves to end."""
        return self.saver.book.pending()

    def take_stats(self) -> KVPoolStats | None:
        """Counts since the last call."""
        if self.book.late_lookups:
            self.stats.count("lookup_timeouts", self.book.late_lookups)
            self.book.late_lookups = 0
        if self.stats.is_empty():
            return None
        self.stats.gauge("pinned_blocks", self.saver.book.pinned_blocks)
        taken, self.stats = self.stats, KVPoolStats()
        return taken

    # Inside

    @property
    def _block_tokens(self) -> int:
        return self._namespace.block_tokens if self._namespace else 1

    @property
    def _eagle(self) -> bool:
        return bool(self._group is not None and self._group.is_eagle_group)

    def _open(self, namespace: Namespace) -> None:
        self._namespace = namespace
        config = self._config
        local = config.local_node
        self._link = PoolLink(
            config,
            namespace,
            f"vllm:{self._engine_id[:8]}",
            before=None if local is None else partial(ensure_local_node, config.pool, local.size, tls=config.tls),
            opened=_say_differences,
        )
        self._calls = PoolCalls(
            self._link, self._config.lease_s, self._config.lookup_timeout_s, self._config.save_timeout_s
        )

    def _chain(self, request: "Request") -> Sequence[bytes]:
        """Hashes of the request's full blocks: a block is named by the last of the hashes that cover it."""
        hashes: Sequence[bytes] = request.block_hashes
        every = self._block_tokens // self._hash_tokens
        return hashes if every == 1 else hashes[every - 1 :: every]

    def _look_up(self, request: "Request", chain: Sequence[bytes]) -> None:
        if not self.book.wants_lookup(request.request_id, chain):
            return
        assert self._calls is not None
        if not self._calls.available():
            self.stats.count("lookup_failures")
            return
        asked = chain[:MATCH_BLOCKS_MAX]
        lookup, superseded = self.book.asked_pool(request.request_id, chain)
        self._calls.look_up(request.request_id, lookup.number, b"".join(asked))
        self._release(superseded)
        self.stats.count("lookup_tokens", len(asked) * self._block_tokens)

    def _take_answers(self) -> None:
        """Everything that the lookup threads have brought, without waiting."""
        while self._calls is not None:
            try:
                self._take(self._calls.answers.get_nowait())
            except queue.Empty:
                return

    def _wait_for_answer(self) -> bool:
        """Wait for one answer within what is left of this step's budget; False when it is used up."""
        assert self._calls is not None
        started_s = time.monotonic()
        try:
            self._take(self._calls.answers.get(timeout=max(0.0, self._budget_s)))
        except queue.Empty:
            self._budget_s = 0.0
            return False
        self._budget_s -= time.monotonic() - started_s
        return True

    def _take(self, answer: Answered) -> None:
        self.stats.count("lookup_failures" if answer.failed else "lookups")
        self.stats.count("lookup_hit_tokens", answer.matched * self._block_tokens)
        self.stats.observe("lookup_seconds", answer.elapsed_s)
        self._release(self.book.pool_answered(answer.request_id, answer.number, answer.matched, answer.lease))

    def _release(self, lease: int) -> None:
        if lease and self._calls is not None:
            self._calls.release(lease)

    def _load_reported(self, number: int, report: LoadReport) -> None:
        loading = self.book.load_reported(number, report)
        if self._gate is not None and report.failed_from is None:
            self._gate.load.measured(report.size_bytes * self._ranks, report.elapsed_s)
        if loading is None:
            return
        self._release(loading.lease)
        wanted = len(loading.job.blocks)
        loaded = wanted if loading.failed_from is None else loading.failed_from
        self.stats.count("load_tokens", loaded * self._block_tokens)
        if loaded < wanted:
            self.stats.count("load_failures")
            log.warning(
                "kvpool: request %s was promised %d blocks, got %d (%s)",
                loading.job.request_id, wanted, loaded, report.reason,
            )  # fmt: skip

    def _plan_saves(self, output: "SchedulerOutput") -> None:
        state = output.kv_connector_block_state
        if self._calls is None or state is None:
            return
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self._live.get(request_id)
            if request is None:
                continue
            # Drafted tokens are not among num_tokens before they are accepted: what is counted here is final.
            computed = min(request.num_computed_tokens + tokens, request.num_tokens)
            if len(self.book.unsaved(request_id, computed // self._block_tokens)):
                table = state.get_block_ids(request_id)
                if table:
                    self.saver.save(self._calls, self._chain_saved(request, computed), request_id, table[0])

    def _chain_saved(self, request: "Request", computed_tokens: int) -> Sequence[bytes]:
        """Hashes of the blocks that are to be in the pool once so many tokens are computed."""
        tokens = computed_tokens if self._config.save_decode else min(computed_tokens, request.num_prompt_tokens)
        return self._chain(request)[: tokens // self._block_tokens]

    def _table(self, request_id: str) -> Sequence[int]:
        """The block ids of a request that runs, as far as it is computed; empty for any other."""
        request = self._live.get(request_id)
        if request is None or self._manager is None or not request.num_computed_tokens:
            return ()
        ids: Sequence[int] = self._manager.get_block_ids(request_id)[0]
        return ids[: request.num_computed_tokens // self._block_tokens]

    def _count(self, name: str, by: int) -> None:
        self.stats.count(name, by)


def _say_differences(status: PoolStatus, ours: Namespace) -> None:
    """Explain at the start what would otherwise show as a hit rate of 0."""
    differences = explain(ours, status.namespaces.values())
    for difference in differences[:3]:
        log.warning("kvpool: the pool holds other blocks of this model, which this engine cannot use: %s", difference)
