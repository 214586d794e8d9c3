"""Several tensor ranks: a block is whole only when every rank has its shard of it."""

import msgspec
import pytest

from kvpool_connector.vllm import worker as worker_module
from tests.vllm.scheduling import rank_worker
from tests.vllm.shapes import BLOCK, Shape

TWO = Shape(tensor_ranks=2)
KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@KINDS
def test_two_ranks_save_and_load_their_own_bytes(engines, tokens, asynchronous):
    """Each rank's tensors hold other bytes; all of them are found right, and counts are of blocks, not of shards."""
    prompt = tokens(4 * BLOCK + 3)
    first = engines.start(TWO)
    first.generate(prompt)
    assert first.count("save_blocks") == 4
    second = engines.start(Shape(tensor_ranks=2, asynchronous=asynchronous))
    name = second.generate(prompt, 3)
    assert second.outputs[name] == second.expected_output(name, 3)
    assert second.count("load_tokens") == 4 * BLOCK
    assert second.half.namespace.shards == 2


def test_a_block_that_one_rank_drops_is_aborted_for_all(engines, tokens, monkeypatch):
    """It never turns visible, although the other rank has written it, and others may write it."""
    original = worker_module._write_wanted

    def fail_on_rank_1(keyspace, reservation, staging, wanted, shard, timeout_s):
        if shard == 1:
            raise RuntimeError("made to fail")
        return original(keyspace, reservation, staging, wanted, shard, timeout_s)

    prompt = tokens(4 * BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "_write_wanted", fail_on_rank_1)
        engine = engines.start(TWO)
        name = engine.generate(prompt)
    assert engine.count("save_blocks") == 0
    assert engine.count("save_dropped_blocks") == 4
    assert engines.in_pool(engine, name) == 0
    again = engines.start(TWO)
    again.generate(prompt)
    assert again.count("save_blocks") == 4
    assert engines.in_pool(engine, name) == 4


def test_both_ranks_report_before_blocks_are_let_go(engines, tokens):
    """One rank's save is done, the other's is not: the blocks stay referenced."""
    held = engines.hold(worker_module.PoolWorker, "_write")
    engine = engines.start(TWO)
    name = engine.add(tokens(3 * BLOCK))
    engine.run(lambda: name in engine.finish_reasons and held.callers == 2)
    assert engine.half.saver.book.pinned_blocks == 3
    held.open()
    engine.drain()


def test_a_load_that_fails_on_one_rank_fails(engines, tokens):
    """V9, V40: the longest prefix that every rank has stays; one report of the request after both."""
    prompt = tokens(5 * BLOCK + 1)
    first = engines.start(TWO)
    name = first.generate(prompt)
    engines.corrupt(first, name, 3, rank=1)
    second = engines.start(TWO)
    name = second.generate(prompt, 3)
    assert second.outputs[name] == second.expected_output(name, 3)
    assert second.recomputed[name] == 2 * BLOCK + 1 + 2
    assert [reported.finished_recving for reported in second.reported if reported.finished_recving] == [{name}]


def test_other_parallel_sizes_get_a_miss(engines, tokens):
    """V27: one rank writes, two read; their blocks are cut another way, so they share nothing."""
    prompt = tokens(4 * BLOCK + 1)
    engines.start().generate(prompt)
    two = engines.start(TWO)
    name = two.generate(prompt, 2)
    assert not two.load_jobs
    assert two.outputs[name] == two.expected_output(name, 2)


def test_ranks_that_disagree_use_no_pool(engines, tokens, caplog):
    """The handshake says which field differs, once."""
    engine = engines.build(TWO)
    worker = rank_worker(engine.ranks[1])
    fields = {**worker.fingerprint.fields, "dtype": "torch.float16"}
    worker.fingerprint = msgspec.structs.replace(worker.fingerprint, fields=fields)
    engine.shake_hands()
    name = engine.generate(tokens(3 * BLOCK), 2)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert not engine.save_jobs
    (message,) = [r.getMessage() for r in caplog.records if "not used" in r.message]
    assert "dtype" in message


def test_a_rank_that_reports_twice(engines, tokens):
    """V40: the same rank's report arrives again while the other has not ended: the load is not over yet."""
    prompt = tokens(4 * BLOCK + 1)
    engines.start(TWO).generate(prompt)
    engine = engines.start(TWO)
    name = engine.add(prompt)
    held = engines.hold(rank_worker(engine.ranks[1]), "_load_steps")
    engine.run(lambda: any(reported.kv_connector_worker_meta for reported in engine.reported))
    (reported,) = [r for r in engine.reported if r.kv_connector_worker_meta]
    engine.connector.update_connector_output(reported)
    assert engine.half.book.loads == 1
    held.open()
    engine.run()
    assert engine.outputs[name] == engine.expected_output(name, 1)


def test_a_rank_that_saves_twice(engines, tokens):
    """V40: a replayed save report does not let blocks go that the other rank still reads."""
    engine = engines.start(TWO)
    held = engines.hold(rank_worker(engine.ranks[1]), "_write")
    engine.add(tokens(3 * BLOCK))
    engine.run(lambda: any(reported.kv_connector_worker_meta for reported in engine.reported))
    (reported,) = [r for r in engine.reported if r.kv_connector_worker_meta]
    engine.connector.update_connector_output(reported)
    assert engine.half.saver.book.pinned_blocks == 3
    held.open()
    engine.drain()
