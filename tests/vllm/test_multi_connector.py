"""As a child of vLLM's MultiConnector, beside a scripted sibling."""

from typing import ClassVar

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tests.vllm.shapes import BLOCK, POOL_CONNECTOR, Shape
from tests.waiting import eventually


class Nothing(KVConnectorMetadata):
    """The sibling tells its workers nothing."""


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Answers look-ups as a test says; what it promises is written by the test."""

    answer = staticmethod(lambda request, tokens: (0, False))
    finished: ClassVar[set] = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return type(self).answer(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            type(self).finished.add(request.request_id)

    def build_connector_meta(self, scheduler_output):
        return Nothing()

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_finished(self, finished_req_ids):
        done, type(self).finished = type(self).finished, set()
        return None, done


SIBLING = {"kv_connector": "Sibling", "kv_connector_module_path": __name__, "kv_role": "kv_both"}


@pytest.fixture
def start(engines, monkeypatch):
    """Starts an engine with both children, the sibling first or last."""

    def start(answer=None, *, first=True, **settings):
        if answer is not None:
            monkeypatch.setattr(Sibling, "answer", staticmethod(answer))
        ours = {**POOL_CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": engines.extra(**settings)}
        children = [SIBLING, ours] if first else [ours, SIBLING]
        transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
        return engines.start(Shape(transfer=transfer))

    return start


def test_it_saves_and_loads_beside_a_sibling(engines, start, tokens):
    """The sibling has nothing: loads and saves are as without it."""
    prompt = tokens(3 * BLOCK + 1)
    engines.start().generate(prompt)
    engine = start()
    name = engine.generate(prompt, 2)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert [len(job.blocks) for job in engine.load_jobs] == [3]
    name = engine.generate(tokens(2 * BLOCK))
    assert engines.in_pool(engine, name) == 2


def test_not_chosen_it_loads_nothing(engines, start, tokens):
    """V18: the sibling, asked first, promises tokens: our child gets the real blocks and 0 tokens."""
    prompt = tokens(3 * BLOCK + 1)
    engines.start().generate(prompt)

    def promise(request, tokens):
        return (0, False) if tokens else (BLOCK, True)

    engine = start(promise)
    held = engine.add(prompt)
    stream = engine.streams[held]
    engine.run(lambda: engine.requests[held].num_computed_tokens)
    table = engine.scheduler.kv_cache_manager.get_block_ids(held)[0]
    engine.ranks[0].model.write(stream, table, 0, BLOCK)  # what the sibling loads
    engine.run()
    assert not engine.load_jobs
    assert engine.outputs[held] == engine.expected_output(held, 1)


def test_not_chosen_step_after_step(engines, start, tokens):
    """V19: asked again and again, chosen at last; the plan of the answer that counts is the one used."""
    prompt = tokens(3 * BLOCK + 1)
    engines.start().generate(prompt)
    engine = start()
    name = engine.add(prompt, 2)
    request = engine.requests[name]
    eventually(lambda: engine.connector.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True))
    for local in (2 * BLOCK, 3 * BLOCK, BLOCK, 0):
        engine.connector.get_num_new_matched_tokens(request, local)
    engine.run()
    assert [len(job.blocks) for job in engine.load_jobs] == [3]
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.count("hook_failures") == 0


def test_a_sibling_that_does_not_know_yet(engines, start, tokens):
    """V20: it answers None first, so that we are not asked in that step; harmless, and our deadline still counts."""
    prompt = tokens(3 * BLOCK + 1)
    engines.start().generate(prompt)
    asked = []

    def not_yet(request, tokens):
        asked.append(request.request_id)
        return (None, False) if len(asked) <= 5 else (0, False)

    engine = start(not_yet)
    name = engine.generate(prompt, 2)
    assert len(asked) >= 6
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.count("load_tokens") == 3 * BLOCK


def test_stats_arrive_through_it(engines, start, tokens):
    """V32: our stats are rebuilt by class name, in another process, from the entry point's registration."""
    import kvpool_connector.vllm

    kvpool_connector.vllm.register()
    kvpool_connector.vllm.register()
    assert "KVPoolConnector" in KVConnectorFactory._registry
    engine = start(first=False)
    engine.generate(tokens(2 * BLOCK))
    rebuilt = MultiConnector.build_kv_connector_stats(engine.raw_stats[-1])
    assert rebuilt is not None
    assert not rebuilt.is_empty()
    assert any("KVPoolConnector" in stats for stats in engine.raw_stats)
    rebuilt.reduce()
    rebuilt.aggregate(MultiConnector.build_kv_connector_stats(engine.raw_stats[0]))


def test_prometheus_metrics_through_it(engines, start, tokens, monkeypatch):
    """V32: the same stats reach the registry of the API server's process."""
    import kvpool_connector.vllm

    kvpool_connector.vllm.register()
    registry = CollectorRegistry()

    def kind(base):
        return lambda **fields: base(**fields, registry=registry)

    types = {Gauge: kind(Gauge), Counter: kind(Counter), Histogram: kind(Histogram)}
    engine = start(first=False)
    engine.generate(tokens(2 * BLOCK))
    metrics = MultiConnector.build_prom_metrics(engine.config, types, ["engine"], {0: ["0"]})
    for stats in engine.raw_stats:
        metrics.observe({k: v.get("data", v) for k, v in stats.items()}, 0)
    assert registry.get_sample_value("vllm:kvpool_save_blocks_total", {"engine": "0"}) == 2
