"""Blocks that the processor cannot reach, through a real pool: each transport, misses, and bytes changed on the way."""

import os
from contextlib import closing

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kvpool
from kvpool.client.meta import MetaClient
from kvpool.core.directory import MissReason
from kvpool.core.errors import InvalidBufferError, OverloadedError, UnavailableError
from kvpool.ops.otel import OtelTracer
from kvpool.ops.tracing import carried
from tests.host_device import BLOCK_BYTES, Device
from tests.integration.conftest import embedded_in

TRANSPORTS = ["inproc", "shm", "unix", "tcp"]
STEPS = ("load", "locate", "read", "verify")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with embedded_in(tmp_path_factory.mktemp("far"), "far", "16MiB") as running:
        yield running


@pytest.fixture(params=TRANSPORTS)
def keyspace(request, pool):
    with closing(kvpool.connect(pool.uri, transports=[request.param])) as client:
        name = f"far-{os.urandom(8).hex()}"
        yield client.namespace(kvpool.Namespace(model=name, block_tokens=16, block_bytes=BLOCK_BYTES))


@pytest.fixture
def device():
    device = Device(40)
    device.memory[:] = np.random.default_rng(9).integers(0, 256, device.memory.shape, np.uint8)
    return device


def chain(blocks):
    return [os.urandom(32) for _ in range(blocks)]


def test_a_round_trip_keeps_every_byte(keyspace, device):
    """Far memory to the pool and back to other blocks, and to a plain array; the rest is untouched."""
    hashes, source, target = chain(6), [30, 2, 17, 3, 4, 5], [11, 39, 0, 8, 9, 10]
    before = device.memory.copy()
    assert keyspace.store(hashes, device.blocks(source)).stored == 6
    assert np.array_equal(device.memory, before)
    assert keyspace.load(hashes, device.blocks(target)).loaded == 6
    before[target] = before[source]
    assert np.array_equal(device.memory, before)
    plain = np.zeros((6, BLOCK_BYTES), np.uint8)
    assert keyspace.load(hashes, plain).loaded == 6
    assert np.array_equal(plain, before[source])


def test_large_transfers_are_staged_in_steps(keyspace, device, monkeypatch):
    monkeypatch.setattr("kvpool.client.far.STAGED_BYTES", 3 * BLOCK_BYTES)
    hashes = chain(8)
    assert keyspace.store(hashes, device.blocks(range(8))).stored == 8
    assert keyspace.load(hashes, device.blocks(range(20, 28))).loaded == 8
    assert np.array_equal(device.memory[20:28], device.memory[:8])


def test_a_long_load_is_located_in_steps_that_grow(keyspace, device, monkeypatch):
    """Each block counts for itself, in whatever step it is; the look-ups share one connection, in order."""
    monkeypatch.setattr("kvpool.client.loading.FAR_STEP_BLOCKS", 2)
    hashes, targets = chain(17), range(20, 37)
    assert keyspace.store(hashes[:15], device.blocks(range(15))).stored == 15
    device.damaged = {21, 30}
    result = keyspace.load(hashes, device.blocks(targets))
    bad, gone = MissReason.VERIFY_FAILED, MissReason.COLD
    expected = [bad if target in device.damaged else None for target in targets][:15] + [gone] * 2
    assert result.reasons == tuple(expected)
    assert (result.loaded, result.size_bytes) == (1, 13 * BLOCK_BYTES)
    device.damaged = set()
    assert keyspace.load(hashes[:15], device.blocks(targets[:15])).loaded == 15
    assert np.array_equal(device.memory[20:35], device.memory[:15])


def test_reads_that_overlap_are_steps_of_the_load(keyspace, device, monkeypatch):
    """Each is part of the load, whatever else was begun or ended meanwhile, and lasts until it is verified."""
    monkeypatch.setattr("kvpool.client.loading.FAR_STEP_BLOCKS", 1)
    monkeypatch.setattr("kvpool.client.loading.FAR_GROWTH", 1)
    hashes, exporter, provider = chain(4), InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    keyspace.store(hashes, device.blocks(range(4)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(keyspace._client, "_tracer", OtelTracer("kvpool-test", {}, provider))
    device.damaged = {22}
    assert keyspace.load(hashes, device.blocks(range(20, 24))).loaded == 2
    spans = {name: [s for s in exporter.get_finished_spans() if s.name == f"kvpool.{name}"] for name in STEPS}
    [load] = spans.pop("load")
    assert carried() == ""
    assert {name: len(some) for name, some in spans.items()} == {"locate": 4, "read": 4, "verify": 4}
    assert {s.parent.span_id for some in spans.values() for s in some} == {load.context.span_id}
    assert [s.attributes["kvpool.bad_blocks"] for s in spans["verify"]] == [0, 0, 1, 0]
    assert spans["locate"][-1].end_time <= spans["read"][0].end_time


@pytest.mark.parametrize("error", [UnavailableError("it has gone"), OverloadedError("too much to do")])
def test_look_ups_that_break_off_are_made_one_by_one(keyspace, device, monkeypatch, error):
    """One that was refused for load is not made again; the others of the call are made."""
    monkeypatch.setattr("kvpool.client.loading.FAR_STEP_BLOCKS", 2)
    hashes, answers = chain(12), MetaClient.calls
    assert keyspace.store(hashes, device.blocks(range(12))).stored == 12

    def broken_off(*arguments):
        yield next(answers(*arguments))
        raise error

    monkeypatch.setattr(MetaClient, "calls", broken_off)
    result = keyspace.load(hashes, device.blocks(range(20, 32)))
    refused = MissReason.OVERLOADED if isinstance(error, OverloadedError) else None
    assert result.reasons == (None, None, *[refused] * 8, None, None)


def test_bytes_that_change_on_the_way_are_a_miss(keyspace, device):
    """The checksum is of what arrived in far memory; the pool's copy is good, and stays."""
    hashes = chain(4)
    keyspace.store(hashes, device.blocks(range(4)))
    device.damaged = {12}
    result = keyspace.load(hashes, device.blocks(range(10, 14)))
    assert result.reasons == (None, None, MissReason.VERIFY_FAILED, None)
    device.damaged = set()
    assert keyspace.load(hashes, device.blocks(range(10, 14))).loaded == 4


def test_a_device_that_refuses_is_a_miss_and_nothing_is_stored(keyspace, device):
    hashes, others = chain(3), chain(3)
    keyspace.store(hashes, device.blocks(range(3)))
    device.refuses = True
    assert keyspace.load(hashes, device.blocks(range(3))).loaded == 0
    assert keyspace.store(others, device.blocks(range(3))).refused == 3
    device.refuses = False
    assert keyspace.match(others).blocks == 0


def test_blocks_that_are_not_there_are_left_alone(keyspace, device):
    hashes = chain(5)
    keyspace.store(hashes[:3], device.blocks(range(3)))
    before = device.memory[30:35].copy()
    result = keyspace.load(hashes, device.blocks(range(30, 35)))
    assert result.loaded == 3
    assert np.array_equal(device.memory[33:35], before[3:])


def test_blocks_of_another_length_are_refused(pool, device):
    with closing(kvpool.connect(pool.uri)) as client:
        other = client.namespace(kvpool.Namespace(model="longer", block_tokens=16, block_bytes=2 * BLOCK_BYTES))
        with pytest.raises(InvalidBufferError, match="8192 bytes"):
            other.load(chain(1), device.blocks([0]))
