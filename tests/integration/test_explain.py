"""`kvpool explain` against real processes: each reason for a miss, said with what is known of it."""

import json
import queue
import subprocess
import sys

import grpc
import msgspec
import pytest

from kvpool.core.limits import EXPLAIN_BLOCKS_MAX
from kvpool.transport.wire.messages import PROTOCOL_VERSION
from kvpool.v1 import common_pb2, membership_pb2, membership_pb2_grpc
from tests.integration.conftest import blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually


class Asker:
    """Runs `kvpool explain` for one pool."""

    def __init__(self, uri):
        self.uri = uri

    def run(self, *options, stdin=""):
        command = [sys.executable, "-m", "kvpool.cli.main", "explain", f"--pool={self.uri}", *options]
        return subprocess.run(command, capture_output=True, check=False, text=True, input=stdin)

    def about(self, chain, *options):
        """What is said of the blocks of a chain, given on standard input."""
        lines = "\n".join(block.hex() for block in chain)
        ended = self.run("--request=-", "--format=json", *options, stdin=lines)
        assert ended.returncode == 0, ended.stderr
        return msgspec.json.decode(ended.stdout)["blocks"]

    def text(self, chain, *options):
        """The same for people, without line breaks."""
        ended = self.run("--request=-", *options, stdin=json.dumps([block.hex() for block in chain]))
        assert ended.returncode == 0, ended.stderr
        return " ".join(ended.stdout.split())


@pytest.fixture
def ask(pool):
    return Asker(pool.uri)


def id_of(keyspace):
    return f"--namespace={keyspace.namespace.id.hex()}"


def test_what_is_held_and_what_was_never_stored(pool, ask, rng):
    keyspace, chain = open_blocks(pool.connect()), random_chain(3)
    keyspace.store(chain[:2], list(random_blocks(rng, 2)))

    held, also_held, never = ask.about(chain, id_of(keyspace))

    assert [held["reason"], also_held["reason"], never["reason"]] == [None, None, "cold"]
    assert held["nodes"] == ["n0"]
    assert held["ago_s"] >= 0
    assert "0-1" in ask.text(chain, id_of(keyspace))
    assert "nobody has stored it since the service started" in ask.text(chain, id_of(keyspace))


def test_one_block_by_its_hash_alone_is_looked_for_everywhere(pool, ask, rng):
    keyspace, chain = open_blocks(pool.connect()), random_chain(1)
    keyspace.store(chain, list(random_blocks(rng, 1)))

    ended = ask.run(f"--hash={chain[0].hex()}", "--format=json")

    [block] = msgspec.json.decode(ended.stdout)["blocks"]
    assert (block["reason"], block["namespace"]) == (None, keyspace.namespace.id.hex())


def test_the_fields_in_which_namespaces_differ(pool, ask, rng, tmp_path):
    """Asked by id, by a document that nobody has opened, and by a model of which nothing is stored."""
    client = pool.connect()
    stored = open_blocks(client, kv_dtype="bfloat16", extra={"lora": "a"})
    asked = client.namespace(msgspec.structs.replace(stored.namespace, kv_dtype="fp8", extra={"lora": "b"}))
    chain = random_chain(2)
    stored.store(chain, list(random_blocks(rng, 2)))
    unopened = msgspec.structs.replace(stored.namespace, epoch=7)
    (tmp_path / "document.json").write_bytes(unopened.document)

    [by_id, _] = ask.about(chain, id_of(asked))
    [by_document, _] = ask.about(chain, f"--namespace={tmp_path / 'document.json'}")
    [by_model, _] = ask.about(chain, "--model=unheard-of")

    there = stored.namespace.id.hex()
    assert {block["reason"] for block in (by_id, by_document, by_model)} == {"wrong_namespace"}
    assert by_id["elsewhere"] == {there: ["kv_dtype: 'fp8' != 'bfloat16'", "extra.lora: 'b' != 'a'"]}
    assert by_document["elsewhere"] == {there: ["epoch: 7 != 0"]}
    assert by_model["elsewhere"] == {there: []}
    assert ask.about(chain, f"--model={stored.namespace.model}")[0]["reason"] is None
    assert ask.about(chain, f"--namespace={there[:12]}")[0]["reason"] is None
    assert "which differs: kv_dtype: 'fp8' != 'bfloat16'" in ask.text(chain, id_of(asked))


def test_evicted_when_why_and_from_where(start_pool, rng):
    pool = start_pool(nodes=1, size="1MiB")
    ask, keyspace = Asker(pool.uri), open_blocks(pool.connect())
    old, new = random_chain(4), random_chain(16)
    keyspace.store(old, list(random_blocks(rng, 4)))
    keyspace.store(new, list(random_blocks(rng, 16)))

    blocks = ask.about(old, id_of(keyspace))

    assert {(b["reason"], b["cause"], *b["nodes"]) for b in blocks} == {("evicted", "room", "n0")}
    assert all(b["fill"] > 0.9 and b["ago_s"] >= 0 and b["idle_s"] >= 0 for b in blocks)
    assert "the pool was full" in ask.text(old, id_of(keyspace))


def test_the_node_that_was_lost_is_named(start_pool, rng):
    pool = start_pool(nodes=1)
    ask, keyspace, chain = Asker(pool.uri), open_blocks(pool.connect()), random_chain(2)
    keyspace.store(chain, list(random_blocks(rng, 2)))
    pool.kill(pool.nodes["n0"])
    eventually(lambda: keyspace.match(chain).blocks == 0)

    blocks = ask.about(chain, id_of(keyspace))

    assert {(b["reason"], b["cause"], *b["nodes"]) for b in blocks} == {("node_down", "node_lost", "n0")}
    assert "(n0): its node was lost" in ask.text(chain, id_of(keyspace))


def test_in_flight_names_the_writer_and_the_time_it_has(pool, ask):
    client = pool.connect(principal="engine-7")
    keyspace, chain = open_blocks(client), random_chain(2)
    reservation = keyspace.reserve(chain)

    blocks = ask.about(chain, id_of(keyspace))

    assert {(b["reason"], b["owner"]) for b in blocks} == {("in_flight", "engine-7")}
    assert all(0 < b["deadline_s"] <= 30 for b in blocks)
    keyspace.abort(reservation)
    assert {(b["reason"], b["cause"]) for b in ask.about(chain, id_of(keyspace))} == {("expired", "aborted")}


def test_a_missing_parent_is_named_with_its_own_reason(start_pool, rng):
    """The parent's bytes change; the blocks below are kept, and wait for it."""
    pool = start_pool(nodes=1)
    ask, keyspace = Asker(pool.uri), open_blocks(pool.connect())
    chain, blocks = random_chain(4), random_blocks(rng, 4)
    keyspace.store(chain, list(blocks))
    payload = pool.directory / "kvpool-n0.payload"
    where = payload.read_bytes().index(blocks[1].tobytes())
    with payload.open("r+b") as file:
        file.seek(where)
        file.write(bytes([blocks[1][0] ^ 1]))
    assert keyspace.load(chain, list(blank(4))).loaded == 1

    first, changed, below, deepest = ask.about(chain, id_of(keyspace))

    assert first["reason"] is None
    assert (changed["reason"], changed["cause"], changed["nodes"]) == ("verify_failed", "reader", ["n0"])
    for block in (below, deepest):
        assert (block["reason"], block["missing_reason"]) == ("parent_missing", "verify_failed")
        assert block["missing"] == chain[1].hex()
    assert "a reader found that its bytes had changed" in ask.text(chain, id_of(keyspace))


def test_what_the_scrub_found_is_said_to_be_its(start_pool, rng):
    pool = start_pool(nodes=1)
    ask, keyspace = Asker(pool.uri), open_blocks(pool.connect())
    chain, blocks = random_chain(1), random_blocks(rng, 1)
    keyspace.store(chain, list(blocks))
    payload = pool.directory / "kvpool-n0.payload"
    where = payload.read_bytes().index(blocks[0].tobytes())
    with payload.open("r+b") as file:
        file.seek(where)
        file.write(bytes([blocks[0][0] ^ 1]))
    subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", "verify", f"--pool={pool.uri}"], capture_output=True, check=False
    )

    [block] = ask.about(chain, id_of(keyspace))

    assert (block["reason"], block["cause"]) == ("verify_failed", "scrub")


def test_nodes_that_have_not_said_what_they_hold_are_named(start_pool):
    """A control stream that has said hello, and not yet what its node holds."""
    pool = start_pool(nodes=0)
    ask, keyspace = Asker(pool.uri), open_blocks(pool.connect())
    chain = random_chain(1)
    said = queue.SimpleQueue()
    segment = common_pb2.Segment(segment_id=bytes(16), medium="shm", capacity_bytes=1 << 20)
    hello = membership_pb2.NodeHello(node_id="slow", incarnation=1, segments=[segment], protocol=PROTOCOL_VERSION)
    said.put(membership_pb2.FromNode(hello=hello))
    with grpc.insecure_channel(pool.uri.removeprefix("grpc://")) as channel:
        call = membership_pb2_grpc.MembershipStub(channel).Control(iter(said.get, None))
        assert next(call).WhichOneof("instruction") == "welcome"

        [block] = ask.about(chain, id_of(keyspace))

        assert (block["reason"], block["nodes"]) == ("recovering", ["slow"])
        said.put(None)
        call.cancel()


def test_a_forgetful_service_says_how_far_back_it_remembers(start_pool, rng):
    pool = start_pool(nodes=0)
    pool.stop(pool.meta)
    pool.start_meta(tombstones=1, **{"expected-nodes": 1})
    pool.start_node("n0", "1MiB")
    ask, keyspace = Asker(pool.uri), open_blocks(pool.connect())
    old = random_chain(4)
    keyspace.store(old, list(random_blocks(rng, 4)))
    keyspace.store(random_chain(16), list(random_blocks(rng, 16)))

    reasons = [block["reason"] for block in ask.about(old, id_of(keyspace))]

    assert sorted(reasons) == ["cold", "cold", "cold", "evicted"]
    assert "what left before is forgotten (meta.tombstones)" in ask.text(old, id_of(keyspace))


def test_a_long_request_is_asked_in_pages_from_a_file(pool, ask, tmp_path):
    keyspace = open_blocks(pool.connect())
    chain = random_chain(2 * EXPLAIN_BLOCKS_MAX + 1)
    request = tmp_path / "request"
    request.write_text(json.dumps([block.hex() for block in chain]))

    ended = ask.run(f"--request={request}", id_of(keyspace), "--format=json")

    assert [block["hash"] for block in msgspec.json.decode(ended.stdout)["blocks"]] == [h.hex() for h in chain]


@pytest.mark.parametrize(
    ("options", "stdin", "code", "message"),
    [
        ([], "", 2, "give either --hash HASH, or --request FILE"),
        (["--hash=" + "ab" * 32, "--request=-"], "", 2, "give either --hash HASH, or --request FILE"),
        (["--hash=abcdef0123"], "", 2, "--hash has 10 digits; give all 64"),
        (["--hash=" + "xy" * 32], "", 2, "a block hash is 64 hex digits"),
        (["--request=-"], "", 2, "--request - has 0 hashes"),
        (["--request=-"], "[1, 2]", 2, "is no JSON list of hashes"),
        (["--request=/nowhere"], "", 2, "cannot be read"),
        (["--hash=" + "ab" * 32, "--namespace=ab", "--model=m"], "", 2, "give --namespace or --model, not both"),
        (["--hash=" + "ab" * 32, "--namespace=abcdef01"], "", 2, "0 namespaces begin like that"),
        (["--hash=" + "ab" * 32, "--namespace=/nowhere"], "", 2, "as a file cannot be read"),
        (["--hash=" + "ab" * 32, "--namespace=" + "ab" * 32], "", 1, "nobody has used it since this service started"),
    ],
)
def test_questions_that_cannot_be(ask, options, stdin, code, message):
    ended = ask.run(*options, stdin=stdin)

    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
