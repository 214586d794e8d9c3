"""Traces of real processes, sent to a real receiver: one request is one tree, whatever processes it went through."""

import os
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

import kvpool
from tests.integration.conftest import Pool, blank, open_blocks, random_blocks, random_chain
from tests.otlp import receiver

BLOCKS = 4


@dataclass
class TracedPool(Pool):
    """A pool whose processes are told where traces go."""

    told: dict[str, str] = field(default_factory=dict)

    def environ(self, name):
        return os.environ | self.told


@pytest.fixture(scope="module")
def received(tmp_path_factory):
    """The spans of a store, of a look-up and a load within one request, and of a load in steps, over tcp."""
    with receiver() as received, ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        pool = TracedPool(tmp_path_factory.mktemp("pool"), stack, told=received.environ)
        pool.start_meta(**{"expected-nodes": 1})
        pool.start_node("n0")
        for name, value in received.environ.items():
            patch.setenv(name, value)
        with kvpool.connect(pool.uri, transports=["tcp"]) as client:
            blocks, chain = open_blocks(client), random_chain(BLOCKS)
            with blocks.tracer.span("write"):
                client.status()
                assert blocks.store(chain, random_blocks(np.random.default_rng(1), BLOCKS)).stored == BLOCKS
            with blocks.tracer.span("request", request_id="r-1"):
                assert blocks.match(chain).blocks == BLOCKS
                assert blocks.load(chain, blank(BLOCKS)).loaded == BLOCKS
            patch.setattr("kvpool.client.loading.STEP_BLOCKS", 1)
            with blocks.tracer.span("long request"):
                assert blocks.load(chain, blank(BLOCKS)).loaded == BLOCKS
        pool.stop(pool.nodes["n0"])  # which sends what is left
        pool.stop(pool.meta)
        yield received


def tree(received, name):
    """The spans of the trace that ``name`` began: (service, name) by the path of names that leads there."""
    [root] = received.named(name)
    assert root.parent_id == b""
    by_id = {span.span_id: span for span in received.spans if span.trace_id == root.trace_id}
    paths = {}
    for span in by_id.values():
        path, above = [span.name], span
        while above.parent_id:
            above = by_id[above.parent_id]
            path.insert(0, above.name)
        paths[" > ".join(path)] = span.service
    return paths


def test_a_request_is_one_tree_through_client_service_and_node(received):
    assert tree(received, "request") == {
        "request": "kvpool-client",
        "request > kvpool.match": "kvpool-client",
        "request > kvpool.match > kvpool.serve.match": "kvpool-meta",
        "request > kvpool.load": "kvpool-client",
        "request > kvpool.load > kvpool.locate": "kvpool-client",
        "request > kvpool.load > kvpool.locate > kvpool.serve.locate": "kvpool-meta",
        "request > kvpool.load > kvpool.read": "kvpool-client",
        "request > kvpool.load > kvpool.read > kvpool.serve.read": "kvpool-node",
        "request > kvpool.load > kvpool.verify": "kvpool-client",
    }


def test_each_step_of_a_long_load_has_its_own_look_up(received):
    """Those that are under way at once are part of the load, not of one another, and the service's are each of one."""
    assert tree(received, "long request").keys() == {
        "long request",
        "long request > kvpool.load",
        "long request > kvpool.load > kvpool.locate",
        "long request > kvpool.load > kvpool.locate > kvpool.serve.locate",
        "long request > kvpool.load > kvpool.read",
        "long request > kvpool.load > kvpool.read > kvpool.serve.read",
        "long request > kvpool.load > kvpool.verify",
    }
    [root] = received.named("long request")
    asked, served = (
        [span for span in received.named(name) if span.trace_id == root.trace_id]
        for name in ("kvpool.locate", "kvpool.serve.locate")
    )
    assert len(asked) == BLOCKS
    assert sorted(span.parent_id for span in served) == sorted(span.span_id for span in asked)


def test_a_store_is_one_tree_down_to_the_commit(received):
    found = tree(received, "write")

    assert found["write > kvpool.serve./kvpool.v1.Admin/GetStatus"] == "kvpool-meta"
    assert found["write > kvpool.store > kvpool.reserve > kvpool.serve.reserve"] == "kvpool-meta"
    assert found["write > kvpool.store > kvpool.write > kvpool.serve.prepare"] == "kvpool-node"
    assert found["write > kvpool.store > kvpool.write > kvpool.serve.write"] == "kvpool-node"
    assert found["write > kvpool.store > kvpool.write > kvpool.serve.write > kvpool.serve.commit"] == "kvpool-meta"


def test_spans_say_how_much_from_where_and_whether_it_was_right(received):
    read, verify, load = (received.named(f"kvpool.{step}")[0] for step in ("read", "verify", "load"))

    assert read.attributes == {
        "kvpool.node": "n0", "kvpool.tier": "shm", "kvpool.transport": "tcp", "kvpool.blocks": BLOCKS,
    }  # fmt: skip
    assert verify.attributes == {"kvpool.verified_blocks": BLOCKS, "kvpool.bad_blocks": 0}
    assert load.attributes["kvpool.loaded_blocks"] == BLOCKS


def test_no_attribute_is_a_hash_a_token_or_a_byte_of_a_block(received):
    values = [value for span in received.spans for value in span.attributes.values()]

    assert values
    assert all(isinstance(value, int) or len(value) < 20 for value in values)


def test_a_receiver_that_is_not_there_fails_no_call(embedded, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with kvpool.connect(embedded.uri) as client:
        blocks, chain = open_blocks(client, 4096), random_chain(1)

        assert blocks.store(chain, np.ones((1, 4096), np.uint8)).stored == 1
        assert blocks.load(chain, blank(1, 4096)).loaded == 1
