"""Loads: right bytes in the right blocks, counts that are right, and one report for each."""

import pytest

from kvpool import Keyspace
from kvpool_connector.vllm import requests
from kvpool_connector.vllm.pages import HostPages
from tests.vllm.shapes import BLOCK, Shape
from tests.waiting import eventually

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def computed_elsewhere(engines, prompt, shape=None, **settings):
    """Another engine has computed and saved the prompt; it, and its request."""
    engine = engines.start(shape, **settings)
    return engine, engine.generate(prompt)


@KINDS
@pytest.mark.parametrize("tail", [0, 1, BLOCK - 1])
def test_a_prompt_is_loaded_and_its_end_computed(engines, tokens, asynchronous, tail):
    """V22, V23: at least one token is computed, also of exactly k blocks; the second allocation loads nothing."""
    prompt = tokens(5 * BLOCK + tail)
    computed_elsewhere(engines, prompt)
    engine = engines.start(Shape(asynchronous=asynchronous))
    name = engine.generate(prompt, 4)
    assert engine.outputs[name] == engine.expected_output(name, 4)
    assert engine.recomputed[name] == (tail or 1) + 3
    assert [len(job.blocks) for job in engine.load_jobs] == [5]
    assert engine.count("load_tokens") == 5 * BLOCK
    assert engine.count("hook_failures") == 0


def test_only_what_is_not_cached_locally_is_loaded(engines, tokens):
    """The load begins behind the local hit, and a hit of the scheduler's own needs no load at all."""
    start, rest = tokens(3 * BLOCK), tokens(2 * BLOCK + 1)
    computed_elsewhere(engines, start + rest)
    engine = engines.start()
    engine.generate([*start, 7])
    name = engine.generate(start + rest, 2)
    assert [(job.first, len(job.blocks)) for job in engine.load_jobs] == [(0, 3), (3, 2)]
    assert engine.outputs[name] == engine.expected_output(name, 2)
    engine.generate(start + rest)
    assert len(engine.load_jobs) == 2


def test_a_preempted_request_loads_what_it_had(engines, tokens):
    """V17: resumed after a preemption, its blocks come from the pool, once, and its saves are not repeated."""
    engine = engines.start(Shape(blocks=24), save_pinned_fraction=1)
    names = [engine.add(tokens(8 * BLOCK), 5 * BLOCK) for _ in range(2)]
    engine.run()
    assert any(engine.requests[name].num_preemptions for name in names)
    for name in names:
        assert engine.outputs[name] == engine.expected_output(name, 5 * BLOCK)
    saved = [h for job in engine.save_jobs for h in _hashes(job)]
    assert len(saved) == len(set(saved)) == 2 * (8 + 5 - 1)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("bad", [0, 2, 4], ids=["first", "middle", "last"])
def test_a_block_that_fails_is_recomputed(engines, tokens, asynchronous, bad):
    """V8, V9 (recompute), V6: the blocks before it stay, the rest is computed, and the output is the right one."""
    prompt = tokens(5 * BLOCK + 1)
    first, name = computed_elsewhere(engines, prompt)
    engines.corrupt(first, name, bad)
    engine = engines.start(Shape(asynchronous=asynchronous))
    name = engine.generate(prompt, 3)
    assert engine.outputs[name] == engine.expected_output(name, 3)
    assert engine.recomputed[name] == (5 - bad) * BLOCK + 1 + 2
    assert engine.count("load_failures") == 1
    assert engine.count("hook_failures") == 0


@pytest.mark.parametrize("bad", [0, 2, 4], ids=["first", "middle", "last"])
def test_a_block_that_fails_fails_its_request_if_so_configured(engines, tokens, bad):
    """V9 (fail): the error surfaces, and nothing wrong is saved."""
    prompt = tokens(5 * BLOCK + 1)
    first, name = computed_elsewhere(engines, prompt)
    engines.corrupt(first, name, bad)
    engine = engines.start(Shape(policy="fail"))
    name = engine.generate(prompt, 3)
    assert engine.finish_reasons[name] == "error"
    assert engine.outputs[name] == []
    assert not engine.save_jobs


def test_what_the_pool_lost_is_saved_anew(own_engines, tokens):
    """After a failed load the recomputed blocks are saved again: the pool lost them between lookup and load."""
    prompt = tokens(4 * BLOCK + 1)
    first, name = computed_elsewhere(own_engines, prompt)
    held = own_engines.hold(Keyspace, "load")
    engine = own_engines.start()
    second = engine.add(prompt, 2)
    engine.run(lambda: held.callers == 1)
    own_engines.lose_blocks()
    eventually(lambda: own_engines.in_pool(first, name) == 0)
    held.open()
    engine.run()
    assert engine.outputs[second] == engine.expected_output(second, 2)
    assert own_engines.in_pool(engine, second) == 4


@pytest.mark.parametrize("negative_s", [0.0, 5.0])
def test_a_load_that_always_fails_is_tried_once(engines, tokens, monkeypatch, negative_s):
    """V7: the pool claims the blocks again and again; each request ends after one try, whatever others remember."""
    monkeypatch.setattr(requests, "NEGATIVE_S", negative_s)
    prompt = tokens(4 * BLOCK + 1)
    computed_elsewhere(engines, prompt)
    monkeypatch.setattr(Keyspace, "load", _raise)
    engine = engines.start(Shape(blocks=64))
    names = [engine.add(prompt, 3) for _ in range(3)]
    engine.run()
    for name in names:
        assert engine.outputs[name] == engine.expected_output(name, 3)
    assert len({job.request_id for job in engine.load_jobs}) == len(engine.load_jobs)


def test_an_aborted_load_is_reported_once(engines, tokens):
    """V11: the request leaves while its blocks arrive; one report, at the end, then nothing more."""
    prompt = tokens(4 * BLOCK + 1)
    computed_elsewhere(engines, prompt)
    held = engines.hold(HostPages, "scatter")
    engine = engines.start()
    name = engine.add(prompt)
    engine.run(lambda: held.callers == 1)
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.abort(name)
    engine.step()
    # The bytes may still arrive: the blocks are the request's until it is reported.
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    held.open()
    engine.drain()
    for _ in range(3):
        engine.step()
    assert [reported.finished_recving for reported in engine.reported if reported.finished_recving] == [{name}]


def test_an_abort_between_report_and_promotion_reports_nothing_more(engines, tokens):
    """V11: the load has been reported, the request not been scheduled again; its blocks are free at once."""
    prompt = tokens(4 * BLOCK + 1)
    computed_elsewhere(engines, prompt)
    engine = engines.start()
    name = engine.add(prompt)
    engine.run(lambda: name in engine.scheduler.finished_recving_kv_req_ids)
    engine.abort(name)
    engine.drain()
    assert [reported.finished_recving for reported in engine.reported if reported.finished_recving] == [{name}]
    assert not engine.save_jobs


def test_an_id_that_comes_back_while_its_old_load_runs(engines, tokens):
    """V3, V11: a client's id is used again; the old load's report is not the new request's."""
    prompt = tokens(4 * BLOCK + 1)
    computed_elsewhere(engines, prompt)
    held = engines.hold(HostPages, "scatter")
    engine = engines.start()
    engine.add(prompt, name="same")
    engine.run(lambda: held.callers == 1)
    engine.abort("same")
    held.open()
    engine.drain()
    engine.add(prompt, 3, name="same")
    engine.run()
    assert engine.outputs["same"] == engine.expected_output("same", 3)


def test_sixteen_requests_with_one_new_prefix(engines, tokens):
    """V14: the prefix is fetched once, and they all begin from it."""
    prefix = tokens(6 * BLOCK)
    computed_elsewhere(engines, prefix + tokens(1))
    engine = engines.start(Shape(blocks=128))
    names = [engine.add(prefix + tokens(5), 2) for _ in range(16)]
    engine.run()
    assert len(engine.load_jobs) <= 2
    for name in names:
        assert engine.outputs[name] == engine.expected_output(name, 2)
        assert engine.recomputed[name] == 5 + 1


def test_they_do_not_wait_for_a_prefix_that_fails(engines, tokens):
    """V14: when the one fetch fails, the others compute; none waits for ever."""
    prefix = tokens(6 * BLOCK)
    first, name = computed_elsewhere(engines, prefix + tokens(1))
    engines.corrupt(first, name, 0)
    engine = engines.start(Shape(blocks=128))
    names = [engine.add(prefix + tokens(5), 2) for _ in range(8)]
    engine.run()
    for name in names:
        assert engine.outputs[name] == engine.expected_output(name, 2)


def test_loads_are_given_up_at_their_deadline(own_engines, tokens):
    """V12: the service is frozen while a load and an aborted load wait for it; both end, and their blocks are free."""
    prompts = [tokens(4 * BLOCK + 1), tokens(3 * BLOCK + 1)]
    for prompt in prompts:
        computed_elsewhere(own_engines, prompt)
    engine = own_engines.start(load_timeout_s=0.5, save_timeout_s=0.5)
    held = own_engines.hold(Keyspace, "load")
    names = [engine.add(prompt, 2) for prompt in prompts]
    engine.run(lambda: held.callers == 2)
    own_engines.freeze_meta()
    held.open()
    engine.abort(names[1])
    engine.run(lambda: engine.scheduler.get_num_unfinished_requests() == 0)
    assert engine.outputs[names[0]] == engine.expected_output(names[0], 2)
    assert engine.recomputed[names[0]] == 4 * BLOCK + 1 + 1
    own_engines.thaw_meta()


def test_reports_of_unknown_jobs_are_ignored(engines, tokens):
    """V11, V40: a worker's output is replayed after its jobs have ended."""
    prompt = tokens(4 * BLOCK + 1)
    computed_elsewhere(engines, prompt)
    engine = engines.start()
    engine.generate(prompt, BLOCK)
    replayed = [reported for reported in engine.reported if reported.kv_connector_worker_meta is not None]
    assert replayed
    for reported in replayed:
        engine.connector.update_connector_output(reported)
    engine.drain()
    assert engine.count("hook_failures") == 0


def test_no_block_table_for_a_request(engines, tokens, monkeypatch):
    """V6: metadata is built although the scheduler has no block table to show."""
    from vllm.v1.core.sched.output import KVConnectorBlockState

    monkeypatch.setattr(KVConnectorBlockState, "get_block_ids", lambda self, req_id: None)
    engine = engines.start()
    name = engine.generate(tokens(3 * BLOCK), 2)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.count("hook_failures") == 0


def test_nothing_is_left_when_an_engine_ends_in_the_middle(engines, tokens):
    """Shutdown while a load is under way: bounded, and it may be repeated."""
    prompt = tokens(4 * BLOCK + 1)
    computed_elsewhere(engines, prompt)
    held = engines.hold(Keyspace, "load")
    engine = engines.start()
    engine.add(prompt)
    engine.run(lambda: held.callers == 1)
    held.open()
    engine.close()
    eventually(lambda: not engine.half._calls)


def _raise(*args, **options):
    raise RuntimeError("made to fail")


def _hashes(job):
    packed = job.reservation.hashes
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]
