"""Saves: never wrong bytes under a valid key, every pin released, nothing lost in silence."""

import threading

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from kvpool import Keyspace
from kvpool.client.results import WriteResult
from kvpool.core.errors import UnavailableError
from kvpool_connector.vllm.pages import HostPages
from tests.vllm.scheduling import STUCK_S, rank_worker
from tests.vllm.shapes import BLOCK, Shape
from tests.waiting import eventually

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def free_blocks(engine):
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def preempt(engine, name):
    """What the scheduler does to a running request when blocks run out."""
    request = engine.requests[name]
    engine.scheduler.running.remove(request)
    Scheduler._preempt_request(engine.scheduler, request, 0.0)
    engine.scheduler.prev_step_scheduled_req_ids.discard(name)


def begin_save(engine, name):
    """Step until the first save of the request is on its way, and no further."""
    engine.run(lambda: engine.recomputed[name])
    eventually(lambda: engine.save_jobs or not engine.half._calls.reservations.empty())
    if not engine.save_jobs:
        engine.step()
    assert len(engine.save_jobs) == 1


def check_in_pool(engines, prompt, blocks):
    """Another engine loads so many blocks, and its model finds them right."""
    engine = engines.start()
    name = engine.generate([*prompt, 5], 2)
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.count("load_tokens") == blocks * BLOCK
    assert engine.count("load_failures") == 0


@KINDS
def test_blocks_that_a_save_reads_are_not_handed_out(engines, tokens, asynchronous):
    """V2: the request is preempted, others want all blocks, and the save reads them only now: the originals."""
    prompt = tokens(6 * BLOCK)
    held = engines.hold(HostPages, "gather")
    engine = engines.start(Shape(blocks=20, asynchronous=asynchronous), save_pinned_fraction=6.5 / 20)
    name = engine.add(prompt, 2 * BLOCK)
    begin_save(engine, name)
    eventually(lambda: held.callers == 1)
    preempt(engine, name)
    engine.abort(name)
    for _ in range(3):  # each writes 13 of the 19 blocks: all that are not held are written several times
        other = engine.add(tokens(12 * BLOCK), BLOCK // 2)
        engine.run(lambda: other in engine.finish_reasons)  # noqa: B023 - run ends before the next
    held.open()
    engine.drain()
    check_in_pool(engines, prompt, 6)


def test_saves_end_in_another_order_after_a_preemption(engines, tokens, monkeypatch):
    """V3: two jobs of one id, the younger ends first; each lets its own blocks go."""
    writes, second = [], threading.Event()
    original = HostPages.gather

    def gather(pages, blocks, out):
        writes.append(list(blocks))
        if len(writes) == 1:
            second.wait(STUCK_S)
        original(pages, blocks, out)
        if len(writes) > 1:
            second.set()

    monkeypatch.setattr(HostPages, "gather", gather)
    prompt = tokens(4 * BLOCK)
    engine = engines.start(save_threads=2, save_pinned_fraction=1)
    name = engine.add(prompt, 2 * BLOCK + 1)
    begin_save(engine, name)
    eventually(lambda: len(writes) == 1)
    preempt(engine, name)
    engine.run()
    assert engine.requests[name].num_preemptions == 1
    assert engine.outputs[name] == engine.expected_output(name, 2 * BLOCK + 1)
    engine.drain()
    check_in_pool(engines, engine.streams[name].tokens[: 6 * BLOCK], 6)


@pytest.mark.parametrize("how", ["raises", "writes nothing", "times out"])
def test_a_write_that_fails(engines, tokens, monkeypatch, how):
    """V4: pins are released, the key is absent, and it is counted; a later request saves the blocks."""

    def write(self, reservation, buffers, **options):
        if how == "raises":
            raise RuntimeError("made to fail")
        return WriteResult((), tuple(range(len(reservation.wants))))

    with monkeypatch.context() as patch:
        if how == "times out":
            patch.setattr(Keyspace, "reserve", _unavailable)
        else:
            patch.setattr(Keyspace, "write", write)
        engine = engines.start()
        prompt = tokens(4 * BLOCK)
        name = engine.generate(prompt)
    assert engine.count("save_dropped_blocks") == 4
    assert engine.count("save_blocks") == 0
    assert engines.in_pool(engine, name) == 0
    engine.check_nothing_leaked()
    again = engines.start()
    eventually(again.half._calls.available)
    again.generate(prompt)
    check_in_pool(engines, prompt, 4)


def test_a_crowded_node_is_tried_again(engines, tokens, monkeypatch):
    """Room in pieces: the abort has the directory make a hole, and what was not written is reserved anew."""
    write, tried = Keyspace.write, []

    def crowded_once(self, reservation, buffers, **options):
        tried.append(len(reservation.wants))
        if len(tried) == 1:
            return WriteResult((), tuple(range(len(reservation.wants))), crowded=True)
        return write(self, reservation, buffers, **options)

    monkeypatch.setattr(Keyspace, "write", crowded_once)
    engine = engines.start()
    prompt = tokens(4 * BLOCK)
    engine.generate(prompt)
    assert tried == [4, 4]
    assert (engine.count("save_blocks"), engine.count("save_dropped_blocks")) == (4, 0)
    engine.check_nothing_leaked()
    check_in_pool(engines, prompt, 4)


@KINDS
def test_a_block_completed_in_the_last_step_is_saved(engines, tokens, asynchronous):
    """V16: also when the request ends in the same step; the last sampled token was never computed."""
    engine = engines.start(Shape(asynchronous=asynchronous))
    name = engine.generate(tokens(2 * BLOCK - 3), 4)
    assert engine.requests[name].num_tokens == 2 * BLOCK + 1
    assert engines.in_pool(engine, name) == 2
    check_in_pool(engines, engine.streams[name].tokens[: 2 * BLOCK], 2)
    name = engine.generate(tokens(2 * BLOCK - 3), 3)
    assert engine.requests[name].num_tokens == 2 * BLOCK
    if not asynchronous:  # otherwise a step beyond the end may have computed it
        assert engines.in_pool(engine, name) == 1


@KINDS
def test_an_end_token_in_the_middle_of_a_block(engines, tokens, asynchronous):
    """V16: a stop token ends the request while, with asynchronous scheduling, another step of it is out."""
    engine = engines.start(Shape(asynchronous=asynchronous))
    prompt = tokens(2 * BLOCK - 2)
    probe = engine.add(prompt, 8)
    stop = engine.expected_output(probe, 3)[-1]
    engine.run()
    name = engine.generate(prompt, 8, sampling={"stop_token_ids": [stop]})
    assert engine.outputs[name] == engine.expected_output(name, 3)
    check_in_pool(engines, engine.streams[name].tokens[: 2 * BLOCK], 2)


@KINDS
def test_preempted_in_its_final_step(engines, tokens, asynchronous):
    """V21: the request has no blocks any more when it ends."""
    engine = engines.start(Shape(asynchronous=asynchronous))
    name = engine.add(tokens(2 * BLOCK), 3)
    engine.run(lambda: len(engine.outputs[name]) == 2 - asynchronous)
    if asynchronous:
        engine.step()
    preempt(engine, name)
    engine.abort(name)
    engine.drain()
    assert engine.count("hook_failures") == 0


@pytest.mark.parametrize("save_decode", [True, False])
def test_generated_blocks_are_saved_if_wanted(engines, tokens, save_decode):
    """Blocks of generated tokens go to the pool for the next turn, or only the prompt's."""
    engine = engines.start(save_decode=save_decode)
    name = engine.generate(tokens(2 * BLOCK + 5), 3 * BLOCK)
    assert engines.in_pool(engine, name) == (5 if save_decode else 2)


def test_saves_are_dropped_under_pressure(engines, tokens):
    """One block may be held at a time: what finds no room is dropped, with a counter, and nothing leaks."""
    held = engines.hold(Keyspace, "write")
    engine = engines.start(save_pinned_fraction=1.5 / 64)
    names = [engine.add(tokens(4 * BLOCK)) for _ in range(3)]
    engine.run(lambda: all(name in engine.finish_reasons for name in names))
    assert engine.half.saver.book.pinned_blocks == 1
    held.open()
    engine.drain()
    assert engine.count("save_dropped_blocks") == 3 * 4 - 1
    assert engine.count("save_blocks") == 1


def test_a_missing_ancestor_is_saved_again(own_engines, tokens):
    """The pool has lost the prompt while its answer is generated: the next save begins at the first missing block."""
    engine = own_engines.start()
    name = engine.add(tokens(3 * BLOCK), 3 * BLOCK)
    begin_save(engine, name)
    eventually(lambda: own_engines.in_pool(engine, name) == 3)
    own_engines.lose_blocks()
    eventually(lambda: own_engines.in_pool(engine, name) == 0)
    saver = engine.half.saver
    engine.run(lambda: any(saving.first == 3 for saving in saver.book._saves.values()))
    eventually(lambda: not engine.half._calls.reservations.empty())  # the answer comes while it still runs
    engine.run()
    assert engine.count("save_replans") >= 1
    assert own_engines.in_pool(engine, name) == 5
    check_in_pool(own_engines, engine.streams[name].tokens[: 5 * BLOCK], 5)


def test_two_engines_save_the_same_blocks(engines, tokens):
    """The first writer wins; the other counts them as existing, and both let their blocks go."""
    held = engines.hold(Keyspace, "match")
    prompt = tokens(4 * BLOCK)
    both = [engines.start(lookup_timeout_s=0.01), engines.start(lookup_timeout_s=0.01)]
    for engine in both:
        engine.generate(prompt)
    held.open()
    assert [engine.count("save_blocks") for engine in both] == [4, 0]
    assert both[1].count("save_existing_blocks") == 4
    check_in_pool(engines, prompt, 4)


def test_waiting_for_saves_is_bounded(engines, tokens):
    """V39: a stuck save makes the engine wait for its blocks a moment, not for ever."""
    held = engines.hold(Keyspace, "write")
    engine = engines.start(Shape(blocks=16), save_pinned_fraction=6 / 16)
    engine.add(tokens(5 * BLOCK), 1)
    engine.run(lambda: held.callers == 1)
    assert engine.connector.has_pending_block_frees()
    eventually(lambda: not engine.connector.has_pending_block_frees())
    names = [engine.add(tokens(2 * BLOCK), 4 * BLOCK) for _ in range(2)]
    engine.run(lambda: all(name in engine.finish_reasons for name in names))
    assert any(engine.requests[name].num_preemptions for name in names)
    held.open()


def test_an_idle_engine_steps_until_its_saves_have_ended(engines, tokens):
    """While saves hold blocks the engine core is asked for further steps, and then no more."""
    held = engines.hold(Keyspace, "write")
    engine = engines.start()
    name = engine.add(tokens(2 * BLOCK))
    engine.run(lambda: name in engine.finish_reasons and held.callers == 1)
    assert engine.scheduler.has_requests()
    assert free_blocks(engine) == engine.kv_config.num_blocks - 1 - 2
    held.open()
    engine.drain()
    assert not engine.scheduler.has_requests()


def test_a_step_with_no_saves_planned_still_begins_its_loads(engines, tokens, monkeypatch):
    """Planning saves fails: it is counted, and the loads of the same step go out."""
    prompt = tokens(3 * BLOCK + 1)
    engines.start().generate(prompt)
    engine = engines.start()
    monkeypatch.setattr(type(engine.half.saver), "save", _raise)
    name = engine.generate(prompt, BLOCK)
    assert engine.outputs[name] == engine.expected_output(name, BLOCK)
    assert engine.count("load_tokens") == 3 * BLOCK
    assert engine.count("hook_failures") > 0


def test_a_worker_that_cannot_begin_a_save_reports_it(engines, tokens):
    """V4: the worker's threads are gone; the save is reported as failed."""
    engine = engines.start()
    rank_worker(engine.ranks[0])._saves.shutdown()
    engine.generate(tokens(3 * BLOCK))
    assert engine.count("save_dropped_blocks") == 3


def _raise(*args, **options):
    raise RuntimeError("made to fail")


def _unavailable(*args, **options):
    raise UnavailableError("made to fail")
