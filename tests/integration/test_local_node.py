"""The store node that engines of a host share: engines are processes here, and so is the node they start."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import psutil
import pytest

import kvpool
from kvpool.core.errors import SettingsError
from kvpool.core.identities import node_identity
from kvpool_connector.local_node import ensure_local_node
from tests.integration.conftest import blank, open_blocks, random_blocks, random_chain
from tests.pki import Pki
from tests.waiting import eventually

NODE_ID = "local"
BLOCKS = 8
STOP_TIMEOUT_S = 10

ENGINE = """
import dataclasses, json, os, sys
from kvpool import TlsSettings
from kvpool.core.errors import KvpoolError
from kvpool_connector.local_node import ensure_local_node

if "bound" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

def say(record):
    print(json.dumps(record, default=str), flush=True)

say("up")
sys.stdin.readline()
try:
    arguments = json.loads(sys.argv[1])
    folder = os.environ.get("TLS_FOLDER")
    tls = TlsSettings(dir=folder) if folder else None
    say(dataclasses.asdict(ensure_local_node(**arguments, tls=tls)))
except KvpoolError as error:
    say({"error": type(error).__name__, "message": str(error)})
sys.stdin.read()
"""


class Engine:
    """A process that asks for the local node when it is told to, and lives until it is told to end."""

    def __init__(self, process):
        self.process = process
        assert json.loads(process.stdout.readline()) == "up"

    def ask(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        assert self.process.wait() == 0

    def kill_tree(self):
        """As vLLM does to its processes when they do not end in time."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def host(place, tmp_path):
    """A host of its own: segments, sockets, logs and locks in folders of this test; its node ends with the test."""
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    place.environ |= {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    place.lock = tmp_path / "state" / "kvpool" / f"{NODE_ID}.lock"
    yield place
    running = nodes(place)
    for process in running:
        process.terminate()
    psutil.wait_procs(running, STOP_TIMEOUT_S)


@pytest.fixture
def start_engine(host):
    with ExitStack() as stack:

        def start(pool, size="16MiB", *words, **environ):
            arguments = json.dumps({"pool": pool, "size": size, "node_id": NODE_ID})
            process = subprocess.Popen(
                [sys.executable, "-c", ENGINE, arguments, *words],
                env=host.environ | environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return Engine(process)

        yield start


@pytest.fixture
def ensure(start_engine):
    """What an engine is told that asks, and ends."""

    def ask(pool, *arguments, **environ):
        engine = start_engine(pool, *arguments, **environ)
        engine.ask()
        answer = engine.answer()
        engine.end()
        return answer

    return ask


def nodes(host):
    return [process for process in host.processes() if "kvpool.cli.main" in process.cmdline()]


def is_ready(client):
    return [(node.node_id, node.state) for node in client.status().nodes] == [(NODE_ID, "ready")]


def test_with_tls_the_node_proves_to_be_itself(start_pool, host, ensure, tmp_path):
    pki = Pki(tmp_path)
    pki.issue(f"node-{NODE_ID}", node_identity(NODE_ID))
    pool = start_pool(0, **{"tls-dir": pki.folder}).uri

    first, second = (ensure(pool, TLS_FOLDER=str(pki.folder)) for _ in range(2))

    assert [first["started"], second["started"], second["pid"]] == [True, False, first["pid"]]
    with kvpool.connect(pool, tls=kvpool.TlsSettings(dir=pki.folder)) as client:
        eventually(lambda: is_ready(client))
        assert any(uri.startswith("tls://") for uri in client.status().nodes[0].endpoints)


def test_the_second_engine_finds_the_node_of_the_first(start_pool, host, ensure):
    pool = start_pool(0).uri

    first, second = ensure(pool), ensure(pool)

    assert (first["started"], second["started"]) == (True, False)
    assert first["pid"] == second["pid"]
    assert first["node_id"] == second["node_id"] == NODE_ID
    assert [process.pid for process in nodes(host)] == [first["pid"]]


def test_engines_that_ask_at_the_same_moment_end_with_one_node(start_pool, host, start_engine):
    pool = start_pool(0).uri
    engines = [start_engine(pool) for _ in range(4)]

    for engine in engines:
        engine.ask()
    answers = [engine.answer() for engine in engines]

    assert sorted(answer["started"] for answer in answers) == [False, False, False, True]
    assert {answer["pid"] for answer in answers} == {process.pid for process in nodes(host)}
    assert len(nodes(host)) == 1


def test_the_node_and_its_blocks_outlive_the_engine_even_if_its_tree_is_killed(start_pool, start_engine, host, rng):
    pool = start_pool(0)
    engine = start_engine(pool.uri)
    engine.ask()
    pid = engine.answer()["pid"]
    client = pool.connect()
    eventually(lambda: is_ready(client))
    blocks, chain, data = open_blocks(client), random_chain(BLOCKS), random_blocks(rng, BLOCKS)
    assert blocks.store(chain, data).stored == BLOCKS

    engine.kill_tree()

    loaded = blank(BLOCKS)
    assert blocks.match(chain).blocks == BLOCKS
    assert blocks.load(chain, loaded).loaded == BLOCKS
    assert np.array_equal(loaded, data)
    assert [process.pid for process in nodes(host)] == [pid]


def test_a_node_that_died_is_started_again_and_has_its_blocks(start_pool, ensure, rng):
    pool = start_pool(0)
    first = ensure(pool.uri)
    client = pool.connect()
    eventually(lambda: is_ready(client))
    blocks, chain = open_blocks(client), random_chain(BLOCKS)
    blocks.store(chain, random_blocks(rng, BLOCKS))

    os.kill(first["pid"], signal.SIGKILL)
    eventually(lambda: blocks.match(chain).blocks == 0)
    second = ensure(pool.uri)

    assert second["started"]
    assert second["pid"] != first["pid"]
    eventually(lambda: blocks.match(chain).blocks == BLOCKS)


def test_a_node_waits_for_a_pool_that_is_not_there_yet(start_pool, ensure):
    pool = start_pool(0)
    pool.stop(pool.meta)

    answer = ensure(pool.uri)
    pool.start_meta()

    assert answer["started"]
    client = pool.connect()
    eventually(lambda: is_ready(client))


def test_a_node_that_was_started_by_hand_is_found(start_pool, host, ensure):
    pool = start_pool(0)
    pool.start_node(NODE_ID, "16MiB", **{"segment-dir": host.segments})

    answer = ensure(pool.uri)

    assert (answer["started"], answer["pid"]) == (False, None)
    assert nodes(host) == []


def test_a_node_whose_files_are_elsewhere_is_found_in_the_pool(start_pool, host, ensure):
    pool = start_pool(0)
    pool.start_node(NODE_ID, "16MiB")  # its socket is taken: a second node ends at once

    answer = ensure(pool.uri, KVPOOL_NODE__UNIX_SOCKET=pool.ready[NODE_ID]["unix"])

    assert (answer["started"], answer["pid"]) == (False, None)
    assert nodes(host) == []


def test_a_node_of_another_pool_is_refused(start_pool, ensure):
    ensure(start_pool(0).uri)

    answer = ensure("grpc://127.0.0.1:9")

    assert answer["error"] == "SettingsError"
    assert "not grpc://127.0.0.1:9: name the pool the same way" in answer["message"]


def test_a_size_that_cannot_be_had_is_told_with_the_nodes_last_words(start_pool, host, ensure):
    answer = ensure(start_pool(0).uri, "900TiB")

    assert answer["error"] == "UnavailableError"
    assert "ended as soon as it was started: error: a segment of 900 TiB" in answer["message"]
    assert "choose a smaller --size" in answer["message"]
    assert nodes(host) == []
    assert list(host.segments.glob("*.payload")) == []


def test_the_node_is_neither_bound_nor_told_as_the_engine_is(start_pool, ensure):
    pool = start_pool(0)

    answer = ensure(
        pool.uri, "16MiB", "bound", VLLM_PORT="1", OMP_NUM_THREADS="1", LD_PRELOAD="", KVPOOL_NODE__SIZE="1MiB"
    )

    node = psutil.Process(answer["pid"])
    assert set(node.cpu_affinity()) >= os.sched_getaffinity(0)
    assert {"VLLM_PORT", "OMP_NUM_THREADS", "LD_PRELOAD"}.isdisjoint(node.environ())
    assert "KVPOOL_NODE__SEGMENT_DIR" in node.environ()
    client = pool.connect()
    eventually(lambda: is_ready(client))
    assert client.status().nodes[0].capacity_bytes == 16 << 20


def test_the_node_has_a_session_of_its_own_and_is_nobodys_child(start_pool, start_engine):
    engine = start_engine(start_pool(0).uri)
    engine.ask()
    pid = engine.answer()["pid"]

    assert psutil.Process(engine.process.pid).children(recursive=True) == []
    assert os.getsid(pid) != os.getsid(engine.process.pid)
    engine.end()


@pytest.mark.parametrize("size", ["8G", "much", "", "0"])
def test_a_bad_size_is_refused_before_anything_is_touched(monkeypatch, tmp_path, size):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    with pytest.raises(SettingsError, match=r"^local_node: size "):
        ensure_local_node("grpc://127.0.0.1:9", size)

    assert list(tmp_path.iterdir()) == []


def test_logs_and_locks_are_private_and_not_behind_links(monkeypatch, tmp_path, host, ensure):
    answer = ensure("grpc://127.0.0.1:9")
    folder = host.lock.parent
    assert answer["started"]
    assert [path.stat().st_mode & 0o777 for path in (folder, *sorted(folder.iterdir()))] == [0o700, 0o600, 0o600]

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kvpool").symlink_to(folder)
    with pytest.raises(SettingsError, match="set XDG_STATE_HOME to a folder of your own"):
        ensure_local_node("grpc://127.0.0.1:9", "16MiB", node_id=NODE_ID)

    (tmp_path / "other" / "kvpool").unlink()
    (tmp_path / "other" / "kvpool").mkdir()
    (tmp_path / "other" / "kvpool" / f"{NODE_ID}.log").symlink_to(tmp_path / "planted")
    with pytest.raises(SettingsError, match="cannot write the log"):
        ensure_local_node("grpc://127.0.0.1:9", "16MiB", node_id=NODE_ID)
    assert not (tmp_path / "planted").exists()
