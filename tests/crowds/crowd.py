"""One process with many clients of a pool, each on a connection and a thread of its own; run as a module.

It reads its orders from stdin and reports to stdout, a line of JSON each. Blocks are made from their keys alone, so
that loads can be checked, whoever stored them.
"""

import json
import os
import random
import socket
import stat
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

import kvpool
from kvpool.testing import find_attempt, make_payload

ATTEMPT = 0
HUNG_S = 10.0
"""A call that ends so long after its deadline did not end by it, however little of a core its process got."""


@dataclass(frozen=True)
class CrowdSettings:
    """What a crowd does."""

    uri: str
    clients: int
    transport: str
    seed: int
    chains: int
    chain_blocks: int = 8
    block_bytes: int = 16 << 10
    timeout_s: float = 5.0
    think_s: float = 0.4
    kills_per_s: float = 0.0
    fill: bool = False
    """Store every chain before the clients begin."""


class Crowd:
    """The clients, and what became of their calls."""

    def __init__(self, settings: CrowdSettings) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._clients: list[kvpool.Client] = []
        self._threads: list[threading.Thread] = []
        self.namespace = kvpool.Namespace(model="crowd", block_tokens=16, block_bytes=settings.block_bytes)

    def start(self) -> None:
        """Connect all, and let them go."""
        if self.settings.fill:
            self._fill()
        for number in range(self.settings.clients):
            client = kvpool.connect(
                self.settings.uri,
                transports=[self.settings.transport],
                timeout_s=30.0,
                streams=1,
                principal=f"crowd:{self.settings.seed}:{number}",
            )
            self._clients.append(client)
            self._spawn(self._live, client, random.Random(f"{self.settings.seed} {number}"))
        if self.settings.kills_per_s:
            self._spawn(self._kill, random.Random(self.settings.seed))

    def _fill(self) -> None:
        settings = self.settings
        with kvpool.connect(settings.uri, transports=[settings.transport], timeout_s=30.0) as client:
            keyspace = client.namespace(self.namespace)
            for number in range(settings.chains):
                hashes = chain_of(number, settings.chain_blocks)
                keyspace.store(hashes, [payload_of(block_hash, settings.block_bytes) for block_hash in hashes])

    def report(self) -> dict[str, object]:
        """The counts so far, and the clients' own summed up."""
        stats = [client.stats() for client in self._clients]
        with self._lock:
            counts = dict(self.counts)
        for name in ("retries", "retries_denied", "overloaded", "reconnects", "verify_failures"):
            counts[name] = sum(getattr(each, name) for each in stats)
        misses: Counter[str] = Counter()
        for each in stats:
            misses.update({str(reason): count for reason, count in each.misses.items()})
        return {"counts": counts, "misses": misses, "most_retries": max(each.retries for each in stats)}

    def stop(self) -> None:
        """End every call and close every client."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()

    def _spawn(self, target, *args) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _live(self, client: kvpool.Client, rng: random.Random) -> None:
        keyspace = client.namespace(self.namespace, timeout_s=30.0)
        one = _One(self, keyspace, rng)
        while not self._stopping.wait(rng.uniform(0, self.settings.think_s)):
            one.call()

    def count(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def _kill(self, rng: random.Random) -> None:
        """Break connections of this process from below, whatever is under way on them."""
        while not self._stopping.wait(rng.expovariate(self.settings.kills_per_s)):
            number = rng.choice([int(entry.name) for entry in Path("/proc/self/fd").iterdir()])
            with suppress(OSError):  # gone meanwhile
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    with socket.socket(fileno=os.dup(number)) as victim:
                        victim.shutdown(socket.SHUT_RDWR)
                        self.count(kills=1)


class _One:
    """One client's calls: mostly loads and look-ups, some stores, of chains that all share."""

    def __init__(self, crowd: Crowd, keyspace: kvpool.Keyspace, rng: random.Random) -> None:
        self._crowd = crowd
        self._keyspace = keyspace
        self._rng = rng
        settings = crowd.settings
        self._buffer = np.zeros((settings.chain_blocks, settings.block_bytes), np.uint8)

    def call(self) -> None:
        settings = self._crowd.settings
        hashes = chain_of(self._rng.randrange(settings.chains), settings.chain_blocks)
        blocks = self._rng.randint(1, settings.chain_blocks)
        call = self._rng.choices((self._load, self._match, self._store), (4, 3, 3))[0]
        began_s = time.monotonic()
        try:
            call(hashes[:blocks])
        except kvpool.UnavailableError:  # the namespace of a service that restarted
            self._crowd.count(unavailable=1)
        hung = time.monotonic() - began_s > settings.timeout_s + HUNG_S
        self._crowd.count(calls=1, hung=int(hung))

    def _match(self, hashes: list[bytes]) -> None:
        matched = self._keyspace.match(hashes, lease_s=1.0, timeout_s=self._crowd.settings.timeout_s)
        self._crowd.count(matches=1, answered=int(matched.asked), matched_blocks=matched.blocks)
        if self._rng.random() < 0.5:  # the others run out
            self._keyspace.release(matched)

    def _load(self, hashes: list[bytes]) -> None:
        buffer = self._buffer[: len(hashes)]
        result = self._keyspace.load(hashes, buffer, timeout_s=self._crowd.settings.timeout_s)
        wrong = 0
        for i, reason in enumerate(result.reasons):
            if reason is None and self._rng.random() < 0.25:
                wrong += find_attempt(hashes[i].hex(), buffer[i].tobytes()) != ATTEMPT
        self._crowd.count(loads=1, loaded_blocks=result.reasons.count(None), wrong=wrong)

    def _store(self, hashes: list[bytes]) -> None:
        size_bytes = self._crowd.settings.block_bytes
        blocks = [payload_of(block_hash, size_bytes) for block_hash in hashes]
        result = self._keyspace.store(hashes, blocks, timeout_s=self._crowd.settings.timeout_s)
        self._crowd.count(stores=1, stored_blocks=result.stored, refused_blocks=result.refused)


def chain_of(number: int, blocks: int) -> list[bytes]:
    """The hashes of a chain that every crowd knows."""
    return kvpool.chain_hashes([number] * blocks, 1)


@lru_cache(maxsize=256)
def payload_of(block_hash: bytes, size_bytes: int) -> bytes:
    """The bytes of a block."""
    return make_payload(block_hash.hex(), ATTEMPT, size_bytes)


def main() -> None:
    """Obey stdin: ``report``, or ``stop``, which reports once more, after every call has ended."""
    crowd = Crowd(CrowdSettings(**json.loads(sys.argv[1])))
    crowd.start()
    say({"clients": len(crowd._clients)})
    for line in sys.stdin:
        if line.strip() == "stop":
            break
        say(crowd.report())
    crowd.stop()
    say(crowd.report())
    sys.stdin.read()  # what is left of this process is looked at before it ends


def say(report: dict[str, object]) -> None:
    sys.stdout.write(f"{json.dumps(report)}\n")
    sys.stdout.flush()


def arguments(settings: CrowdSettings) -> list[str]:
    """The command that starts this settings' crowd, from the repository's root."""
    return [sys.executable, "-m", "tests.crowds.crowd", json.dumps(asdict(settings))]


if __name__ == "__main__":
    main()
