"""The event stream as vLLM's own classes see it: its decoder reads it, and one client serves both publishers."""

import socket
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
    ZmqEventPublisher,
)

import kvpool
from kvpool.embedded import EmbeddedPool
from kvpool.ops.settings import MetaSettings, NodeSettings
from kvpool.transport.wire import events as wire

POLL_MS = 20_000
BLOCKS = 8

decoder = msgspec.msgpack.Decoder(KVEventBatch)


@contextmanager
def kvpool_stream(folder):
    """A pool, and what stores one chain after another there; each fills it."""
    node = NodeSettings(
        node_id="n0", size=BLOCKS * 4096, data_port=0, grpc_port=0, segment_dir=folder,
        unix_socket=folder / "n0.sock", keep_segment=False,
    )  # fmt: skip
    with EmbeddedPool(MetaSettings(grpc_port=0, framed_port=0, events_port=0), node) as pool, pool.connect() as client:
        blocks = client.namespace(kvpool.Namespace(model="m", block_tokens=16, block_bytes=4096))

        def publish(i):
            chain = kvpool.chain_hashes(range(100 * i, 100 * i + BLOCKS), 1)
            assert blocks.store(chain, np.ones((BLOCKS, 4096), np.uint8)).stored == BLOCKS
            return chain

        yield pool.meta.event_endpoints, publish


@contextmanager
def vllm_stream(_folder):
    """vLLM's own publisher, with the events of an engine."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(f"tcp://127.0.0.1:{probe.getsockname()[1]}")

    class Publisher(ZmqEventPublisher):
        """Binds to the address that it is given: vLLM's connects, unless it is told to bind to all interfaces."""

        @staticmethod
        def _is_bind_endpoint(endpoint):
            return True

    publisher = Publisher(0, endpoint=ports[0], replay_endpoint=ports[1], topic="kvpool")

    def publish(i):
        hashes = [bytes([i]) * 32]
        stored = BlockStored(
            block_hashes=hashes, parent_block_hash=None, token_ids=[], block_size=16, lora_id=None, medium="GPU",
            lora_name=None,
        )  # fmt: skip
        publisher.publish(EventBatch(ts=0.0, events=[stored]))
        return hashes

    try:
        yield ports, publish
    finally:
        publisher.shutdown()


def replayed(context, endpoint, wanted):
    """All messages so far by their numbers, once they have said that ``wanted`` is stored."""
    batches, stored = {}, set()
    with closing(context.socket(zmq.DEALER)) as asking:
        asking.linger = 0
        asking.connect(endpoint)
        while not wanted <= stored:
            asking.send_multipart((b"", bytes(8)))
            while (frames := received(asking))[2] != ZmqEventPublisher.END_SEQ:
                empty, topic, sequence, payload = frames
                assert (empty, topic) == (b"", b"kvpool")
                batches[int.from_bytes(sequence, "big")] = decoder.decode(payload)
            assert frames == [b"", b"", ZmqEventPublisher.END_SEQ, b""]
            events = [event for batch in batches.values() for event in batch.events]
            stored = {h for event in events if isinstance(event, BlockStored) for h in event.block_hashes}
    return batches


def received(sock):
    assert sock.poll(POLL_MS)
    return sock.recv_multipart()


@pytest.mark.parametrize("stream", [vllm_stream, kvpool_stream])
def test_one_client_serves_both(stream, tmp_path):
    """It missed what came before it was there, has that sent again, and reads on."""
    with stream(tmp_path) as (endpoints, publish), zmq.Context() as context, closing(context.socket(zmq.SUB)) as live:
        wanted = {block_hash for i in range(3) for block_hash in publish(i)}
        live.connect(endpoints[0])
        live.subscribe(b"kvpool")
        batches = replayed(context, endpoints[1], wanted)
        assert list(batches) == list(range(min(batches), max(batches) + 1))

        i = 3
        publish(i)
        while not live.poll(100):  # not subscribed yet
            i += 1
            publish(i)
        topic, sequence, payload = live.recv_multipart()
        assert topic == b"kvpool"
        assert int.from_bytes(sequence, "big") >= min(batches)
        assert decoder.decode(payload).events


def test_vllm_reads_what_we_say(tmp_path):
    with kvpool_stream(tmp_path) as (endpoints, publish), zmq.Context() as context:
        first, second = publish(1), publish(2)
        batches = replayed(context, endpoints[1], {*first, *second})
    events = [event for batch in batches.values() for event in batch.events]

    whose = wire.ownership(kvpool.Namespace(model="m", block_tokens=16, block_bytes=4096).id)
    stored = [e for e in events if isinstance(e, BlockStored)]
    removed = [e for e in events if isinstance(e, BlockRemoved)]
    assert events[0] == AllBlocksCleared()
    assert {type(batch) for batch in batches.values()} == {KVEventBatch}
    assert len(stored) + len(removed) + 1 == len(events)
    assert [h for e in stored for h in e.block_hashes] == first + second
    assert sorted(h for e in removed for h in e.block_hashes) == sorted(first)
    assert stored[0].parent_block_hash is None
    assert {(e.block_size, e.lora_id, e.lora_name) for e in stored} == {(16, None, None)}
    assert [e.token_ids for e in stored] == [[]] * len(stored)
    assert {(e.medium, e.locality, e.ownership) for e in (*stored, *removed)} == {("STORAGE", "REMOTE", whose)}
    assert all(e.group_idx is None for e in (*stored, *removed))


def test_we_write_what_vllm_writes():
    """The same event, encoded by both, has the same fields with the same values."""
    whose = wire.ownership(bytes(32))
    theirs = BlockStored(
        block_hashes=[bytes(32)], parent_block_hash=None, token_ids=[], block_size=16, lora_id=None,
        medium="STORAGE", lora_name=None, locality="REMOTE", ownership=whose,
    )  # fmt: skip
    ours = wire.BlockStored(block_hashes=[bytes(32)], parent_block_hash=None, block_size=16, ownership=whose)
    gone = BlockRemoved(block_hashes=[bytes(32)], medium="STORAGE", locality="REMOTE", ownership=whose)
    ours_gone = wire.BlockRemoved(block_hashes=[bytes(32)], ownership=whose)

    left = msgspec.msgpack.encode(EventBatch(ts=1.5, events=[theirs, gone, AllBlocksCleared()]))
    right = wire.encode(wire.EventBatch(1.5, [ours, ours_gone, wire.AllBlocksCleared()]))

    assert msgspec.msgpack.decode(left) == msgspec.msgpack.decode(right)
    assert wire.decode_batch(left).events == [ours, ours_gone, wire.AllBlocksCleared()]
