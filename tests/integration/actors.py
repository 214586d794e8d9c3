"""Clients in processes of their own, which do one thing at a time when told, and may be killed or stopped at it."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Self

import numpy as np

import kvpool
from kvpool.ops.failpoints import VARIABLE
from kvpool.testing import Call, Commit, Get, History, Put, find_attempt, make_payload
from tests.integration.points import Points
from tests.waiting import eventually, is_frozen

BLOCK_BYTES = 8 << 10
NAMESPACE = kvpool.Namespace(model="faults", block_tokens=16, block_bytes=BLOCK_BYTES)
SLACK_S = 2.0
"""A call ends by its deadline, and then its caller has to get a processor."""

Records = list[Put | Commit | Get | Call]

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def payload(chain: list[bytes], attempt: int) -> np.ndarray:
    """What put number ``attempt`` writes for a chain: a row for each block."""
    return np.frombuffer(b"".join(make_payload(key.hex(), attempt, BLOCK_BYTES) for key in chain), np.uint8).reshape(
        len(chain), BLOCK_BYTES
    )


def cut(blocks: np.ndarray, pieces: int) -> list[np.ndarray] | np.ndarray:
    """The blocks as buffers: one whole, or each in so many pieces."""
    return blocks if pieces == 1 else [list(block.reshape(pieces, -1)) for block in blocks]


def put(keyspace: kvpool.Keyspace, chain: list[bytes], attempt: int, timeout_s: float, pieces: int = 1) -> tuple:
    """Store a chain; the result, and what is to be recorded of it. A put that is in doubt counts as committed."""
    began_s = time.monotonic()
    stored = keyspace.store(chain, cut(payload(chain, attempt), pieces), timeout_s=timeout_s)
    records: Records = [Call("put", began_s, began_s + timeout_s + SLACK_S, time.monotonic())]
    if stored.existing + stored.in_flight < len(chain):
        records += doubtful(chain, attempt, began_s)
    return stored, records


def doubtful(chain: Iterable[bytes], attempt: int, began_s: float) -> Records:
    """The records of a put of which nobody knows what became of it."""
    keys = [key.hex() for key in chain]
    return [Put(key, attempt, began_s) for key in keys] + [Commit(key, attempt, began_s) for key in keys]


def get(keyspace: kvpool.Keyspace, chain: list[bytes], timeout_s: float, pieces: int = 1) -> tuple:
    """Load a chain; the result, and a record of each block that came."""
    began_s = time.monotonic()
    blocks = np.zeros((len(chain), BLOCK_BYTES), np.uint8)
    loaded = keyspace.load(chain, cut(blocks, pieces), timeout_s=timeout_s)
    ended_s = time.monotonic()
    records: Records = [Call("get", began_s, began_s + timeout_s + SLACK_S, ended_s)]
    for key, block, reason in zip(chain, blocks, loaded.reasons, strict=True):
        if reason is None:
            records.append(Get(key.hex(), find_attempt(key.hex(), block.tobytes()), began_s, ended_s))
    return loaded, records


def match(keyspace: kvpool.Keyspace, chain: list[bytes], timeout_s: float) -> tuple:
    """Match a chain and take the longest lease on it."""
    began_s = time.monotonic()
    matched = keyspace.match(chain, lease_s=60, timeout_s=timeout_s)
    return matched, [Call("match", began_s, began_s + timeout_s + SLACK_S, time.monotonic())]


DEEDS = {"put": put, "get": get, "match": match}


def _serve(pipe: Connection, uri: str, transport: str, points: str) -> None:
    os.environ[VARIABLE] = points
    with kvpool.connect(uri, transports=[transport], streams=1) as client:
        keyspace = client.namespace(NAMESPACE)
        keyspace.match([bytes(32)])
        pipe.send(None)
        while (told := pipe.recv()) is not None:
            name, arguments = told
            pipe.send(DEEDS[name](keyspace, **arguments))


class Actor:
    """One client process; a context manager that leaves none behind."""

    def __init__(self, uri: str, transport: str, points: Points) -> None:
        self.points = points
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=_serve, args=(theirs, uri, transport, str(points.directory)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process.close()

    def begin(self, deed: str, **arguments: object) -> None:
        self._pipe.send((deed, arguments))

    def result(self, history: History) -> object:
        """What the deed came to; waits for it."""
        result, records = self._pipe.recv()
        for record in records:
            history.add(record)
        return result

    def is_dead(self) -> bool:
        return not self._process.is_alive()

    def wait_until_frozen(self) -> None:
        eventually(lambda: is_frozen(self._process.pid))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)
