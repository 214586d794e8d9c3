"""The disk tier with real nodes: blocks that were read outlive their place in memory, restarts, and failing disks."""

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.core.slots import SlotState
from kvpool.node.headers import PROLOGUE_BYTES, RECORD
from tests.integration.conftest import BLOCK_BYTES, Pool, blank, open_blocks, random_blocks, random_chain
from tests.integration.test_corruption import flip_at, run_verify, scrub_of
from tests.waiting import eventually

MEMORY_BLOCKS = 8
BLOCKS = 4
NO_SCRUB = {"scrub-bytes-per-s": 0}


def start_node(pool: Pool, directory: Path | None = None, **options: object) -> Path:
    """A node with little memory and a disk four times as large; where that is."""
    directory = directory or pool.directory / "disk"
    directory.mkdir(exist_ok=True)
    size = {"size": f"{MEMORY_BLOCKS * BLOCK_BYTES}B", "disk-size": f"{4 * MEMORY_BLOCKS * BLOCK_BYTES}B"}
    pool.start_node("n0", **{**size, "disk": directory, **NO_SCRUB, **options})
    return directory


def counter(client: kvpool.Client, name: str) -> int:
    return client.status().counters[name]


def fill(keyspace: kvpool.Keyspace, rng, blocks: int = MEMORY_BLOCKS) -> None:
    """Store blocks that nobody reads."""
    block_bytes = keyspace.namespace.block_bytes
    stored = keyspace.store(random_chain(blocks), list(random_blocks(rng, blocks, block_bytes)))
    assert stored.stored == blocks


def put_on_disk(client, keyspace, rng, blocks: int = BLOCKS) -> tuple[list[bytes], np.ndarray]:
    """A chain that was read, and then lost its place in memory to others: its hashes and bytes."""
    chain, stored = random_chain(blocks), random_blocks(rng, blocks, keyspace.namespace.block_bytes)
    demoted, reclaimed = counter(client, "demoted_blocks"), counter(client, "reclaimed_copies")
    keyspace.store(chain, list(stored))
    keyspace.load(chain, list(np.empty_like(stored)))
    fill(keyspace, rng, MEMORY_BLOCKS - blocks)
    eventually(lambda: counter(client, "demoted_blocks") == demoted + blocks)
    fill(keyspace, rng)
    assert counter(client, "reclaimed_copies") == reclaimed + blocks
    return chain, stored


def assert_loads(keyspace, chain, blocks) -> None:
    loaded = np.zeros_like(blocks)
    assert keyspace.load(chain, list(loaded)).loaded == len(chain)
    np.testing.assert_array_equal(blocks, loaded)


def disk_of(client: kvpool.Client):
    [node] = client.status().nodes
    return next(segment for segment in node.segments if segment.medium == "disk")


def committed_in_file(directory: Path) -> int:
    """Headers that a restart would find."""
    records = np.frombuffer((directory / "kvpool-disk.headers").read_bytes(), RECORD, offset=PROLOGUE_BYTES)
    return int((records["state"] == SlotState.COMMITTED).sum())


def kvpool_status(pool: Pool) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvpool.cli.main", "status", "--pool", pool.uri]
    wide = os.environ | {"COLUMNS": "200"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=wide)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_what_was_read_is_served_from_disk_and_comes_back_to_memory(start_pool, rng, transport):
    pool = start_pool(nodes=0)
    start_node(pool)
    client = pool.connect(transport)
    keyspace = open_blocks(client, block_bytes=BLOCK_BYTES - 100)
    chain, blocks = put_on_disk(client, keyspace, rng)

    assert_loads(keyspace, chain, blocks)

    assert client.stats().loaded_bytes["disk"] == blocks.nbytes
    eventually(lambda: counter(client, "promoted_blocks") == BLOCKS)
    in_memory_before = client.stats().loaded_bytes[transport]
    assert_loads(keyspace, chain, blocks)
    assert client.stats().loaded_bytes == {"disk": blocks.nbytes, transport: in_memory_before + blocks.nbytes}
    assert client.stats().verify_failures == 0


def test_what_nobody_read_is_evicted_and_never_written_to_disk(start_pool, rng):
    pool = start_pool(nodes=0)
    start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    fill(keyspace, rng)
    fill(keyspace, rng)

    assert counter(client, "evicted_blocks") == MEMORY_BLOCKS
    assert (counter(client, "demoted_blocks"), disk_of(client).used_bytes) == (0, 0)


@pytest.mark.parametrize("memory_is_lost", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_blocks_on_disk_are_found_again_by_the_next_start(start_pool, rng, killed, memory_is_lost):
    pool = start_pool(nodes=0)
    directory = start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = put_on_disk(client, keyspace, rng)

    if killed:
        eventually(lambda: committed_in_file(directory) == BLOCKS)
        pool.kill(pool.nodes["n0"])
    else:
        pool.stop(pool.nodes["n0"])
    if memory_is_lost:
        for path in pool.directory.glob("kvpool-n0.*"):
            path.unlink()
    start_node(pool)

    eventually(lambda: keyspace.match(chain).blocks == BLOCKS)
    assert disk_of(client).blocks == BLOCKS
    assert_loads(keyspace, chain, blocks)
    assert client.stats().loaded_bytes["disk"] == blocks.nbytes


def test_a_restarted_service_learns_of_both_tiers(start_pool, rng):
    pool = start_pool(nodes=0)
    start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = put_on_disk(client, keyspace, rng)
    assert_loads(keyspace, chain, blocks)
    eventually(lambda: counter(client, "promoted_blocks") == BLOCKS)

    pool.kill(pool.meta)
    pool.start_meta(**{"expected-nodes": 1})

    eventually(lambda: keyspace.match(chain).blocks == BLOCKS)
    assert disk_of(client).blocks == BLOCKS
    assert counter(client, "surplus_bytes") == blocks.nbytes, "what is on disk too is spare in memory"
    assert_loads(keyspace, chain, blocks)


def test_a_bit_that_flips_on_disk_is_refused_by_its_reader(start_pool, rng):
    pool = start_pool(nodes=0)
    directory = start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = put_on_disk(client, keyspace, rng)
    payload = directory / "kvpool-disk.payload"
    flip_at(payload, payload.read_bytes().index(blocks[2].tobytes()) + 77, 3)

    result = keyspace.load(chain, list(blank(BLOCKS)))

    assert (result.loaded, result.reasons[2]) == (2, kvpool.MissReason.VERIFY_FAILED)
    assert client.stats().verify_failures == 1
    assert keyspace.match(chain) == kvpool.Match(2, kvpool.MissReason.VERIFY_FAILED)
    eventually(lambda: scrub_of(client).retired_bytes == BLOCK_BYTES)


def test_the_scrub_reads_the_disk_itself_and_finds_what_nobody_reads(start_pool, rng):
    pool = start_pool(nodes=0)
    directory = start_node(pool, **{"scrub-bytes-per-s": "1GiB", "scrub-interval": "50ms"})
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = put_on_disk(client, keyspace, rng)
    pid = pool.nodes["n0"].pid
    passes, read_bytes = scrub_of(client).passes, bytes_read_by(pid)
    eventually(lambda: scrub_of(client).passes > passes + 2)
    assert bytes_read_by(pid) >= read_bytes + 2 * blocks.nbytes, "each pass reads the disk, and no cache"
    payload = directory / "kvpool-disk.payload"

    flip_at(payload, payload.read_bytes().index(blocks[1].tobytes()) + 5, 0)

    eventually(lambda: scrub_of(client).bad_blocks == 1)
    assert keyspace.match(chain) == kvpool.Match(1, kvpool.MissReason.VERIFY_FAILED)
    assert client.stats().verify_failures == 0
    assert run_verify(pool)[0] == 0, "found once, and out of use since"


def test_verify_checks_both_tiers(start_pool, rng):
    pool = start_pool(nodes=0)
    directory = start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    _, blocks = put_on_disk(client, keyspace, rng)
    code, found, _ = run_verify(pool)
    assert (code, found["n0"]["blocks"]) == (0, MEMORY_BLOCKS + BLOCKS)
    payload = directory / "kvpool-disk.payload"
    flip_at(payload, payload.read_bytes().index(blocks[3].tobytes()), 0)

    code, found, _ = run_verify(pool)

    assert (code, found["n0"]["bad"]) == (1, 1)


def test_a_file_cut_short_costs_its_blocks_and_then_the_tier(start_pool, rng):
    """What an I/O error looks like to a reader; the third one turns the disk off, and memory serves."""
    pool = start_pool(nodes=0)
    directory = start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, _ = put_on_disk(client, keyspace, rng)
    os.truncate(directory / "kvpool-disk.payload", 0)

    result = keyspace.load(chain, list(blank(BLOCKS)))

    assert result.loaded == 0
    eventually(lambda: disk_of(client).off)
    assert_is_off_and_memory_serves(pool, client, keyspace, rng)
    pool.stop(pool.nodes["n0"])
    for path in pool.directory.glob("kvpool-n0.*"):
        path.unlink()  # blocks that it finds again may be leased: they would be spared, and nothing could be stored
    start_node(pool)
    eventually(lambda: not disk_of(client).off)
    put_on_disk(client, keyspace, rng)


def assert_turns_off(client, keyspace, chain, blocks, why):
    """What is stored and read is to go to a disk that does not take it: the tier says why, and memory has it still."""
    keyspace.store(chain, list(blocks))
    assert_loads(keyspace, chain, blocks)
    eventually(lambda: disk_of(client).off)

    assert why in disk_of(client).off
    assert_loads(keyspace, chain, blocks)


def test_a_limit_on_files_turns_the_tier_off_and_memory_serves(start_pool, rng):
    pool = start_pool(nodes=0)
    block_bytes = 1 << 20
    start_node(pool, **{"size": f"{MEMORY_BLOCKS}MiB", "disk-size": "64MiB"})
    client = pool.connect()
    keyspace = open_blocks(client, block_bytes=block_bytes)
    resource.prlimit(pool.nodes["n0"].pid, resource.RLIMIT_FSIZE, (2 * block_bytes, resource.RLIM_INFINITY))

    chain, blocks = random_chain(6), random_blocks(rng, 6, block_bytes)
    assert_turns_off(client, keyspace, chain, blocks, "File too large")
    assert_is_off_and_memory_serves(pool, client, keyspace, rng)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_turns_the_tier_off_and_memory_serves(start_pool, rng, small_disk):
    """Its file has a hole, as one of a file system that writes elsewhere has; the rest is taken by another file."""
    pool = start_pool(nodes=0)
    start_node(pool, small_disk)
    client = pool.connect()
    keyspace = open_blocks(client)
    punch_hole(small_disk / "kvpool-disk.payload")
    take_all_room(small_disk)

    chain, blocks = random_chain(MEMORY_BLOCKS), random_blocks(rng, MEMORY_BLOCKS)
    assert_turns_off(client, keyspace, chain, blocks, "No space left")
    assert_is_off_and_memory_serves(pool, client, keyspace, rng)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 4 MiB."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mounted], check=True)
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


def test_a_drain_takes_what_is_on_disk_to_other_nodes(start_pool, rng):
    pool = start_pool(nodes=0)
    start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, blocks = put_on_disk(client, keyspace, rng)
    pool.start_node("n1")

    eventually(lambda: len(client.status().nodes) == 2)
    command = [sys.executable, "-m", "kvpool.cli.main", "drain", "n0", "--pool", pool.uri, "--format=json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["left_blocks"] == 0
    assert_loads(keyspace, chain, blocks)
    assert "disk" not in client.stats().loaded_bytes


def test_explain_and_status_tell_of_the_disk(start_pool, rng):
    pool = start_pool(nodes=0)
    start_node(pool)
    client = pool.connect()
    keyspace = open_blocks(client)
    chain, _ = put_on_disk(client, keyspace, rng)
    request = pool.directory / "request.txt"
    request.write_text("\n".join(h.hex() for h in chain))
    model = keyspace.namespace.model
    command = ["explain", f"--request={request}", f"--model={model}", f"--pool={pool.uri}", "--format=json"]
    ended = subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", *command], capture_output=True, text=True, timeout=60, check=False
    )

    assert "n0 (disk)" in ended.stdout
    code, shown = kvpool_status(pool)
    assert code == 0
    assert "256 KiB of 2 MiB" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"disk": "{here}/absent", "disk-size": "1MiB"}, "absent is not a directory; make it first"),
        ({"disk": "{here}/disk"}, "write e.g. 100GiB"),
        ({"disk-size": "1MiB"}, "name a directory with disk"),
        ({"disk": "{here}", "disk-size": "1000TiB"}, "choose a smaller --disk-size"),
        ({"disk": "{here}/disk", "disk-size": "1MiB"}, "give each node a directory of its own"),
    ],
)
def test_a_disk_that_cannot_be_is_refused_with_what_to_do(start_pool, options, error):
    pool = start_pool(nodes=0)
    start_node(pool)
    given = [f"--{name}={str(value).format(here=pool.directory)}" for name, value in options.items()]
    where = ["--node-id=n1", f"--meta={pool.uri}", f"--segment-dir={pool.directory}", "--size=1MiB"]
    where += ["--data-port=0", "--grpc-port=0", f"--unix-socket={pool.directory}/n1.sock"]

    ended = subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", "node", *where, *given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode in {1, 2}
    assert error in " ".join(ended.stderr.split())
    assert not list(pool.directory.glob("kvpool-n1.payload"))


def assert_is_off_and_memory_serves(pool: Pool, client: kvpool.Client, keyspace: kvpool.Keyspace, rng) -> None:
    """The tier is out of use, which is shown, and puts and gets go on in memory alone."""
    demoted, block_bytes = counter(client, "demoted_blocks"), keyspace.namespace.block_bytes
    chain, blocks = random_chain(BLOCKS), random_blocks(rng, BLOCKS, block_bytes)
    assert keyspace.store(chain, list(blocks)).stored == BLOCKS
    assert_loads(keyspace, chain, blocks)
    assert (disk_of(client).used_bytes, counter(client, "disk_capacity_bytes")) == (0, 0)
    assert counter(client, "demoted_blocks") == demoted
    code, shown = kvpool_status(pool)
    assert code == 4
    assert "turned off: disk of n0" in shown
    assert (pool.directory / "n0.log").read_text().count("medium_off") == 1


def bytes_read_by(pid: int) -> int:
    """Bytes that a process has fetched from storage."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["read_bytes"])


def punch_hole(path: Path) -> None:
    """Give all of a file's room back to its file system; its size stays."""
    keep_size_punch_hole = 0x01 | 0x02
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file:
        size = ctypes.c_long(path.stat().st_size)
        assert libc.fallocate(file.fileno(), keep_size_punch_hole, ctypes.c_long(0), size) == 0


def take_all_room(directory: Path) -> None:
    with (directory / "another").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(directory).free)
