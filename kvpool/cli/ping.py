"""`kvpool ping`: stores a few blocks, loads them again, and says how long each step took."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

import numpy as np
import typer

from kvpool.cli import with_settings
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_client
from kvpool.cli.output import Format, UnhealthyError, emit
from kvpool.core.limits import HASH_BYTES
from kvpool.core.namespace import Namespace
from kvpool.ops.settings import Settings

Answer = TypeVar("Answer")

NAMESPACE = Namespace(model="kvpool-ping", block_tokens=16, block_bytes=64 << 10)

Blocks = Annotated[int, typer.Option("--blocks", min=1, max=4096, help="Blocks of 64 KiB to store and load.")]


@dataclass(frozen=True, slots=True)
class Pinged:
    """What came of it; times in milliseconds."""

    blocks: int
    stored: int
    matched: int
    loaded: int
    right: bool
    store_ms: float
    match_ms: float
    load_ms: float
    loaded_bytes: dict[str, int]
    """By transport."""


@with_settings("client.pool", "client.timeout_s", "client.transports", "client.streams", *CLIENT_TLS_KEYS)
def ping(settings: Settings, output: Format, blocks: Blocks = 16) -> None:
    """Store new blocks, look them up, load them and compare every byte; they are evicted like any others.

    Exit with 3 if the pool cannot be reached, 4 if it did not give everything back.
    """
    hashes = [os.urandom(HASH_BYTES) for _ in range(blocks)]
    written = np.frombuffer(os.urandom(blocks * NAMESPACE.block_bytes), np.uint8).reshape(blocks, -1)
    read = np.zeros_like(written)
    with connect_client(settings) as pool:
        keyspace = pool.namespace(NAMESPACE)
        stored, store_ms = _timed(lambda: keyspace.store(hashes, written))
        matched, match_ms = _timed(lambda: keyspace.match(hashes))
        loaded, load_ms = _timed(lambda: keyspace.load(hashes, read))
        found = Pinged(
            blocks=blocks,
            stored=stored.stored,
            matched=matched.blocks,
            loaded=loaded.loaded,
            right=bool(np.array_equal(written, read)),
            store_ms=store_ms,
            match_ms=match_ms,
            load_ms=load_ms,
            loaded_bytes=pool.stats().loaded_bytes,
        )
    emit(asdict(found), output, _text(found))
    if not found.right:
        raise UnhealthyError(
            f"of {blocks} blocks {found.stored} were stored and {found.loaded} came back; see `kvpool status`"
        )


def _text(found: Pinged) -> str:
    ways = ", ".join(found.loaded_bytes) or "nothing"
    return (
        f"{found.loaded} of {found.blocks} blocks came back over {ways}: "
        f"store {found.store_ms:.2f} ms, match {found.match_ms:.2f} ms, load {found.load_ms:.2f} ms"
    )


def _timed(call: Callable[[], Answer]) -> tuple[Answer, float]:
    began_s = time.perf_counter()
    answer = call()
    return answer, round((time.perf_counter() - began_s) * 1e3, 3)
