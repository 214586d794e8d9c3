"""The event stream between processes: a pool, and `kvpool events`, which follows it and is stopped, and left behind."""

import queue
import signal
import socket
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

import kvpool
from kvpool.bench.process import RoleProcess
from kvpool.core.limits import PAGE_BYTES
from kvpool.events import Follower
from tests.integration.conftest import Pool, open_blocks, random_chain
from tests.waiting import eventually

CHAIN_BLOCKS = 256
HWM = 2
REPLAY_BATCHES = 8


class FollowingProcess(RoleProcess):
    """`kvpool events`, and the index that its lines make."""

    def __init__(self, pool, log):
        super().__init__("events", {"pool": pool.uri}, log)
        self.known: dict[str, set[str]] = {}
        self.sources: set[str] = set()

    def read(self):
        """Take in what it has said."""
        while True:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return self.known
            said = msgspec.json.decode(line)
            self.sources.add(said["source"])
            if said["event"] == "cleared":
                self.known = {}
            elif said["event"] == "stored":
                self.known.setdefault(said["namespace"], set()).update(said["hashes"])
            else:
                self.known[said["namespace"]].difference_update(said["hashes"])

    def knows(self, truth):
        return {namespace: found for namespace, found in self.read().items() if found} == truth


def two_free_ports():
    """The first of two neighbours, as the stream and its replays have them."""
    for _ in range(100):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two ports that follow one another are free")


@pytest.fixture
def pool(tmp_path):
    with ExitStack() as stack:
        pool = Pool(tmp_path, stack)
        pool.options = {
            "expected-nodes": 1,
            "node-ttl": "3s",
            "events-port": two_free_ports(),
            "events-hwm": HWM,
            "events-replay-batches": REPLAY_BATCHES,
        }
        pool.start_meta(**pool.options)
        pool.start_node("n0", "4MiB")
        yield pool


def truth_of(blocks, chains):
    """What look-ups find of these chains."""
    found = {h.hex() for chain in chains for h in chain[: blocks.match(chain).blocks]}
    return {blocks.namespace.id.hex(): found} if found else {}


def test_a_follower_that_is_stopped_is_left_behind_and_catches_up(pool, tmp_path):
    """And so does one whose service was killed, or whose node was."""
    content = np.ones((CHAIN_BLOCKS, PAGE_BYTES), np.uint8)
    with FollowingProcess(pool, tmp_path / "events.log") as follower, pool.connect(timeout_s=30.0) as client:
        blocks = open_blocks(client, PAGE_BYTES)
        chains = [random_chain(CHAIN_BLOCKS)]
        assert blocks.store(chains[0], content).stored == CHAIN_BLOCKS
        eventually(lambda: follower.knows(truth_of(blocks, chains)))
        assert follower.sources <= {"snapshot", "live"}

        # Stopped: four times the pool's size is stored beside it, all of it, until the stream drops what is for it.
        pool.signal(follower, signal.SIGSTOP)
        while not (client.status().counters["events_dropped"] and len(chains) > 16):
            chains.append(random_chain(CHAIN_BLOCKS))
            assert blocks.store(chains[-1], content).stored == CHAIN_BLOCKS
        stats = client.status().counters
        assert stats["events_lost"] == 0
        assert stats["evicted_blocks"] > CHAIN_BLOCKS
        pool.signal(follower, signal.SIGCONT)
        eventually(lambda: follower.knows(truth_of(blocks, chains)))
        assert "snapshot" in follower.sources

        # A service that starts again knows what its node announces.
        before = truth_of(blocks, chains)
        pool.kill(pool.meta)
        follower.sources.clear()
        pool.start_meta(**pool.options)
        eventually(lambda: follower.knows(before) and follower.sources)
        assert truth_of(blocks, chains) == before

        # What lay on a lost node is gone.
        pool.kill(pool.nodes["n0"])
        eventually(lambda: follower.knows({}))
        with Follower(*client.status().events) as fresh:
            assert [len(told.events) for told in fresh.poll(10.0)] == [1]


def test_who_does_not_publish_is_not_followed(tmp_path, start_pool):
    pool = start_pool(0)

    with RoleProcess("events", {"pool": pool.uri, "once": True}, tmp_path / "events.log") as follower:
        assert follower.wait(30.0) == 2
        assert b"--events-port" in (tmp_path / "events.log").read_bytes()
    with kvpool.connect(pool.uri) as client:
        assert client.status().events == ()
