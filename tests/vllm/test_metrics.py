"""Counts: added over ranks and steps, reduced for the log line, exported to Prometheus."""

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool_connector.vllm.metrics import COUNTERS, GAUGES, HISTOGRAMS, SAMPLES_MAX, KVPoolStats
from tests.vllm.shapes import BLOCK, Shape


def test_stats_add_up():
    """Counters are added, seconds collected, gauges replaced; what was added to is what comes back."""
    left, right = KVPoolStats(), KVPoolStats()
    left.count("lookups", 2)
    left.observe("load_seconds", 0.5)
    left.gauge("pinned_blocks", 9)
    right.count("lookups")
    right.count("load_tokens", 32)
    right.observe("load_seconds", 1.5)
    right.gauge("pinned_blocks", 4)
    assert left.aggregate(right) is left
    assert left.reduce() == {"load_avg_ms": 1_000.0, "load_tokens": 32, "lookups": 3, "pinned_blocks": 4}
    assert right.data["lookups"] == 1
    left.reset()
    assert left.is_empty()
    assert left.reduce() == {}


def test_samples_are_bounded():
    stats = KVPoolStats()
    for _ in range(SAMPLES_MAX + 5):
        stats.observe("save_seconds", 1.0)
    assert len(stats.data["save_seconds"]) == SAMPLES_MAX
    assert len(stats.aggregate(KVPoolStats(data={"save_seconds": [2.0]})).data["save_seconds"]) == SAMPLES_MAX


def test_an_engine_counts_what_it_does(engines, tokens):
    """Every name that is counted is exported, survives msgpack, and the numbers are the right ones."""
    prompt = tokens(4 * BLOCK + 1)
    first = engines.start(Shape(tensor_ranks=2))
    first.generate(prompt)
    second = engines.start(Shape(tensor_ranks=2))
    second.generate(prompt)
    for engine in (first, second):
        assert set(engine.stats) <= {*COUNTERS, *HISTOGRAMS, *GAUGES}
        for stats in engine.raw_stats:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats)) == stats
    block_bytes = first.half.namespace.block_bytes
    assert first.count("lookup_tokens") == first.count("save_blocks") * BLOCK == 4 * BLOCK
    assert first.count("save_bytes") == 4 * block_bytes * 2
    assert second.count("lookup_hit_tokens") == second.count("load_tokens") == 4 * BLOCK
    assert second.count("load_bytes") == 4 * block_bytes * 2
    assert len(second.stats["load_seconds"]) == 2


def test_prometheus(engines, tokens):
    """Shown as 0 before anything happens; observed under the engine's labels."""
    registry = CollectorRegistry()

    def kind(base):
        return lambda **fields: base(**fields, registry=registry)

    types = {Gauge: kind(Gauge), Counter: kind(Counter), Histogram: kind(Histogram)}
    engine = engines.start()
    connector = type(engine.connector)
    metrics = connector.build_prom_metrics(engine.config, types, ["engine"], {0: ["0"], 1: ["1"]})
    assert registry.get_sample_value("vllm:kvpool_lookups_total", {"engine": "1"}) == 0
    engine.generate(tokens(2 * BLOCK))
    for stats in engine.raw_stats:
        metrics.observe(connector.build_kv_connector_stats(stats).data, 1)
    metrics.observe({"a_name_of_another_version": 1}, 0)
    assert registry.get_sample_value("vllm:kvpool_lookups_total", {"engine": "1"}) == 1
    assert registry.get_sample_value("vllm:kvpool_save_blocks_total", {"engine": "1"}) == 2
    assert registry.get_sample_value("vllm:kvpool_save_seconds_count", {"engine": "1"}) == 1
    assert registry.get_sample_value("vllm:kvpool_lookups_total", {"engine": "0"}) == 0
