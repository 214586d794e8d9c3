"""Misuse gets one clear error that names the value; nothing stored is lost and the services stay up."""

import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import kvpool
from kvpool.bench.process import RoleProcess
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain


@pytest.fixture
def stored(pool, rng):
    """A namespace with four blocks, and a check that they are still served."""
    chain, blocks = random_chain(4), random_blocks(rng, 4)
    keyspace = open_blocks(pool.connect())
    keyspace.store(chain, list(blocks))
    yield keyspace, chain
    loaded = blank(4)
    assert keyspace.load(chain, list(loaded)).loaded == 4
    np.testing.assert_array_equal(blocks, loaded)


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ([b"x" * 31], r"hashes\[0\] is 31 bytes; a block hash is 32"),
        (b"x" * 33, "33 bytes, not a multiple of 32"),
        ([], "no hashes given"),
        (["x" * 32], r"hashes\[0\] is str"),
        (bytes(32 * 70_000), "70000 hashes in one call; the limit is 65536"),
    ],
)
def test_hashes_that_cannot_be(stored, hashes, message):
    keyspace, _ = stored
    with pytest.raises(kvpool.InvalidHashError, match=message):
        keyspace.match(hashes)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (np.zeros(100, np.uint8), f"100 bytes; the namespace's blocks have {BLOCK_BYTES}"),
        (bytes(BLOCK_BYTES), "read-only"),
        (np.zeros(2 * BLOCK_BYTES, np.uint8)[::2], "not contiguous"),
        (object(), "no buffer"),
        ([], "0 pieces"),
    ],
)
def test_buffers_that_cannot_be_loaded_into(stored, buffer, message):
    keyspace, chain = stored
    with pytest.raises(kvpool.InvalidBufferError, match=message):
        keyspace.load(chain, [buffer])


def test_more_buffers_than_hashes(stored):
    keyspace, chain = stored
    with pytest.raises(kvpool.InvalidHashError, match="first=3 and 2 buffers reach beyond the 4 hashes"):
        keyspace.load(chain, list(blank(2)), first=3)


def test_a_shard_that_the_namespace_does_not_have(stored):
    keyspace, chain = stored
    with pytest.raises(kvpool.NamespaceMismatchError, match="shard 1 is not one of the namespace's 1"):
        keyspace.load(chain, list(blank(1)), shard=1)


def test_a_block_given_under_another_parent(stored, rng):
    keyspace, chain = stored
    with pytest.raises(kvpool.NamespaceMismatchError, match=r"hashes\[1\] is stored below another parent"):
        keyspace.store([os.urandom(32), chain[2]], list(random_blocks(rng, 2)))


def test_a_namespace_of_another_block_size_is_another_namespace(stored, pool):
    keyspace, chain = stored
    other = kvpool.Namespace(model=keyspace.namespace.model, block_tokens=16, block_bytes=2 * BLOCK_BYTES)

    (difference,) = keyspace.namespace.difference(other)

    assert str(difference) == f"block_bytes: {BLOCK_BYTES} != {2 * BLOCK_BYTES}"
    assert pool.connect().namespace(other).match(chain).blocks == 0


@pytest.mark.parametrize("fields", [{"block_bytes": 0}, {"block_tokens": -1}, {"shards": 1000}, {"model": ""}])
def test_a_namespace_that_cannot_be(fields):
    document = {"model": "m", "block_tokens": 16, "block_bytes": 4096, **fields}
    with pytest.raises(kvpool.InvalidNamespaceError, match=next(iter(fields))):
        kvpool.Namespace(**document)


def test_a_closed_client(pool):
    client = pool.connect()
    keyspace = open_blocks(client)
    client.close()
    with pytest.raises(kvpool.ClosedError):
        keyspace.match(random_chain(1))


@pytest.mark.parametrize("timeout_s", [0, -1, 1e9, float("nan")])
def test_a_deadline_that_cannot_be(stored, timeout_s):
    keyspace, chain = stored
    with pytest.raises(kvpool.UsageError, match="timeout_s"):
        keyspace.match(chain, timeout_s=timeout_s)


@contextmanager
def _closed_early() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise


def _say(address: str, data: bytes) -> bytes:
    """Send ``data`` to a framed port and read until it closes, which it may do before it has read all."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), 10) as sock, _closed_early():
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while chunk := sock.recv(1 << 16):
            answer += chunk
    return answer


def _frame(kind: int, body: bytes, payload_bytes: int = 0, body_bytes: int | None = None) -> bytes:
    length = len(body) if body_bytes is None else body_bytes
    return struct.pack("<4sHHIIIIQ", b"KVP1", kind, 0, 1, 1000, length, 0, payload_bytes) + body


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        os.urandom(4096),
        _frame(10, b"\xc1" * 40),
        _frame(10, b"", body_bytes=0xFFFF_FFFF),
        _frame(32, b"", payload_bytes=1 << 62),
        _frame(65_535, b"\x90"),
        _frame(10, b"\x94\xc4\x20" + bytes(32) + b"\xc4\x1f" + bytes(31) + b"\x00\x00"),
        b"KV",
        b"",
    ],
)
def test_garbage_on_a_framed_port_closes_that_connection_only(pool, stored, data):
    for address in (pool.ready["n0"]["data"], pool.meta_ready["framed"]):
        _say(address, data)


def test_a_request_that_cannot_be_decoded_is_answered_with_the_reason(pool, stored):
    for address in (pool.ready["n0"]["data"], pool.meta_ready["framed"]):
        assert b"ProtocolError" in _say(address, _frame(10, b"\xc1" * 40))


def test_a_reservation_is_of_one_namespace(pool, rng):
    client, chain = pool.connect(), random_chain(1)
    mine, other = open_blocks(client), open_blocks(client)
    reservation = mine.reserve(chain)

    with pytest.raises(kvpool.NamespaceMismatchError, match="another namespace"):
        other.write(reservation, list(random_blocks(rng, 1)))

    mine.write(reservation, list(random_blocks(rng, 1)))
    assert mine.match(chain).blocks == 1


def test_a_client_is_not_carried_over_a_fork(stored):
    keyspace, chain = stored
    child = os.fork()
    if child == 0:
        try:
            keyspace.match(chain)
        except kvpool.UsageError as error:
            os._exit(42 if "fork" in str(error) else 1)
        os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_buffers_given_for_two_blocks_cost_neither_block(pool, rng):
    """What was read is overwritten: no success, and not the pool's fault."""
    chain, blocks, shared = random_chain(2), random_blocks(rng, 2), blank(1)[0]
    keyspace = open_blocks(pool.connect("tcp", streams=1))
    keyspace.store(chain, list(blocks))
    halves = shared.reshape(2, -1)

    keyspace.load(chain, [[halves[0], halves[0]], [halves[1], halves[0]]])

    assert keyspace.match(chain).blocks == 2


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvpool.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_segment_larger_than_shared_memory_is_refused_before_anything_starts(pool, tmp_path):
    done = _run("node", "--meta", pool.uri, "--size", "100TiB", "--node-id", "huge", "--segment-dir", tmp_path)

    assert done.returncode == 1
    assert "100 TiB with 3.32 TiB of headers does not fit" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.payload"))


def test_a_second_node_of_the_same_name_is_refused(pool, tmp_path):
    options = ("--data-port", 0, "--grpc-port", 0, "--unix-socket", tmp_path / "x.sock", "--size", "1MiB")
    done = _run("node", "--meta", pool.uri, "--node-id", "n0", "--segment-dir", pool.directory, *options)

    assert done.returncode == 1
    assert "another node 'n0' uses" in done.stderr


def test_a_node_named_as_a_live_one_elsewhere_is_refused(pool, stored, tmp_path):
    options = ("--data-port", 0, "--grpc-port", 0, "--unix-socket", tmp_path / "x.sock", "--size", "1MiB")
    done = _run(
        "node", "--meta", pool.uri, "--node-id", "n0", "--segment-dir", tmp_path, "--join-timeout", "1s", *options
    )

    assert done.returncode == 3
    assert "a live node is called 'n0'; give this one another --node-id" in done.stderr
    assert not list(tmp_path.glob("kvpool-*"))


def test_a_node_without_its_metadata_service_says_so_and_ends(tmp_path):
    options = ("--data-port", 0, "--grpc-port", 0, "--unix-socket", tmp_path / "x.sock", "--size", "1MiB")
    done = _run("node", "--meta", "grpc://127.0.0.1:1", "--segment-dir", tmp_path, "--join-timeout", "500ms", *options)

    assert done.returncode == 3
    assert "did not take the node in" in done.stderr
    assert "--meta" in done.stderr


def test_a_full_pool_whose_blocks_are_all_held_refuses_and_keeps_them(start_pool, rng):
    pool = start_pool(size="1MiB")
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks, loaded = random_chain(8), random_blocks(rng, 8), blank(8)
    keyspace.store(chain, list(blocks))
    assert keyspace.match(chain, lease_s=60).blocks == 8

    # Half of the pool is leased; the other half can turn over, the leased half cannot go.
    stored = [keyspace.store(random_chain(4), list(random_blocks(rng, 4))).stored for _ in range(8)]

    assert stored == [4] * 8
    assert keyspace.load(chain, list(loaded)).loaded == 8
    np.testing.assert_array_equal(blocks, loaded)


def test_a_service_of_another_kind_at_the_address(silent_server, tmp_path):
    process = RoleProcess(
        "node",
        {
            "meta": f"grpc://{silent_server}",
            "join-timeout": "1s",
            "segment-dir": tmp_path,
            "unix-socket": tmp_path / "x.sock",
            "data-port": 0,
            "grpc-port": 0,
            "size": "1MiB",
        },
        tmp_path / "log",
    )
    with process, pytest.raises(kvpool.UnavailableError, match="ended with status 3"):
        process.ready()
