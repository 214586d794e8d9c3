"""Forgetting what was saved: after a weight update nothing old is found, and nothing is left over."""

from kvpool import Keyspace
from kvpool_connector.vllm.pages import HostPages
from tests.vllm.shapes import BLOCK
from tests.waiting import eventually


def test_after_a_reset_nothing_old_is_found(engines, tokens):
    """V29: the weights have changed; other namespaces are intact."""
    prompt = tokens(3 * BLOCK + 1)
    engine = engines.start()
    engine.generate(prompt)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.shape.weights = 77
    eventually(engine.reached)
    name = engine.generate(prompt, 2)
    assert not engine.load_jobs
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engines.in_pool(engine, name) == 3
    other = engines.start()
    other.generate(prompt)
    assert other.count("load_tokens") == 3 * BLOCK


def test_a_reset_while_saves_wait_for_their_places(engines, tokens):
    """V30: reservations are under way; their blocks are let go, and nothing of them is written."""
    held = engines.hold(Keyspace, "reserve")
    engine = engines.start()
    name = engine.add(tokens(3 * BLOCK))
    engine.run(lambda: name in engine.finish_reasons and held.callers == 1)
    engine.connector.reset_cache()
    held.open()
    eventually(engine.reached)
    engine.drain()
    assert engine.count("save_dropped_blocks") == 3


def test_a_reset_while_saves_are_written(engines, tokens):
    """V30: a rank reads the blocks: they stay referenced until it has ended, and are then let go."""
    held = engines.hold(HostPages, "gather")
    engine = engines.start()
    prompt = tokens(3 * BLOCK)
    name = engine.add(prompt)
    engine.run(lambda: name in engine.finish_reasons and held.callers == 1)
    engine.connector.reset_cache()
    assert engine.half.saver.book.pinned_blocks == 3
    held.open()
    eventually(engine.reached)
    engine.drain()
    name = engine.generate([*prompt, 4])
    assert not engine.load_jobs


def test_a_reset_while_a_request_is_looked_up_and_loaded(engines, tokens):
    """V30: an old lookup's answer is not used; a load under way makes the reset say no."""
    prompt = tokens(3 * BLOCK + 1)
    engines.start().generate(prompt)
    held = engines.hold(Keyspace, "load")
    engine = engines.start()
    name = engine.add(prompt, 2)
    engine.run(lambda: held.callers == 1)
    assert engine.connector.reset_cache() is False
    held.open()
    eventually(engine.reached)
    engine.run()
    assert engine.outputs[name] == engine.expected_output(name, 2)
    assert engine.connector.reset_cache()
    eventually(engine.reached)


def test_what_was_computed_before_is_not_saved_after(engines, tokens):
    """V29: a request that runs on has blocks of the old weights; the new namespace gets none of them."""
    engine = engines.start()
    name = engine.add(tokens(2 * BLOCK), 3 * BLOCK)
    engine.run(lambda: engine.outputs[name])
    engine.connector.reset_cache()
    eventually(engine.reached)
    engine.run()
    assert engine.outputs[name] == engine.expected_output(name, 3 * BLOCK)
    assert engines.in_pool(engine, name) == 0


def test_running_requests_survive_a_reset(engines, tokens):
    """V30: they are preempted in the same call; saves in flight make the local reset fail loudly, else all is new."""
    engine = engines.start()
    name = engine.add(tokens(3 * BLOCK), 2 * BLOCK)
    engine.run(lambda: len(engine.outputs[name]) > 1 and not len(engine.half.saver.book))
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    eventually(engine.reached)
    engine.run()
    assert engine.outputs[name] == engine.expected_output(name, 2 * BLOCK)
    assert not engine.load_jobs


def test_shutdown_with_saves_under_way(engines, tokens):
    """The engine ends in the middle: bounded, and nothing is counted as referenced any more."""
    held = engines.hold(Keyspace, "reserve")
    engine = engines.start()
    name = engine.add(tokens(3 * BLOCK))
    engine.run(lambda: name in engine.finish_reasons and held.callers == 1)
    held.open()
    engine.close()
    assert engine.half.saver.book.pinned_blocks == 0
