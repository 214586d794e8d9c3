"""Look-ups: how long the pool takes to say how much of a chain it holds, and what an entry costs in memory.

Through the framed protocol against a metadata service in a process of its own, whole chains, all stored, with a lease
asked for as an engine does; and the directory alone, in this process.
"""

import ctypes
import gc
import hashlib
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvpool
from kvpool.bench.measure import at_least, child, heard, percentile, pool_processes, rounded, say, settle
from kvpool.core.directory import AnnouncedBlock, Directory, Inventory, Match
from kvpool.core.errors import KvpoolError, UsageError
from kvpool.core.keys import split_hashes
from kvpool.core.limits import HASH_BYTES, MATCH_BLOCKS_MAX, PAGE_BYTES, RESERVE_BLOCKS_MAX, SEGMENT_ID_BYTES

SIZES = (1, 64, 512, 4_096, 32_768)
TARGETS_MS = {1: 0.06, 64: 0.07, 512: 0.13, 4_096: 0.35}
"""Most p50 milliseconds that the design asks for, on the machine of its own measurements."""

TARGET_BYTES_PER_BLOCK = 320
TARGET_BYTES_PER_COPY = 40
VIAS = ("unix", "tcp")
LEASE_S = 5.0
HEADROOM = 1.5
"""A pool that is nearly full grants leases on half of it only: room enough that it is not."""

MEMORY_CHAIN_BLOCKS = 256
_SEGMENT = bytes(SEGMENT_ID_BYTES)
_OTHER_SEGMENT = b"\1" * SEGMENT_ID_BYTES
NAMESPACE = kvpool.Namespace(model="kvpool-bench", block_tokens=16, block_bytes=PAGE_BYTES)


class LookupRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="lookup"):
    """Look-ups of a whole chain of ``size`` blocks over ``via``; ``keys_per_s`` of one caller, all calls together."""

    size: int
    p50_ms: float
    p99_ms: float
    keys_per_s: float
    via: str


class LookupCoreRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="lookup_core"):
    """The same look-up in the directory itself, without a wire."""

    size: int
    p50_us: float


class DirectoryMemoryRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="directory_memory"):
    """Growth of resident memory while a directory took ``blocks`` blocks of one shard, then a second copy of each."""

    blocks: int
    bytes_per_block: float
    bytes_per_copy: float


def measure_lookup(sizes: Sequence[int], samples: int, **meta: object) -> Iterator[LookupRow]:
    """Look up chains through the framed protocol, over a Unix socket and over TCP; ``meta``: the service's settings.

    Raises:
        KvpoolError: The pool did not start, or does not find what it stored.
    """
    for via in VIAS:
        yield from _measure_via(via, sizes, samples, meta)


def measure_lookup_core(sizes: Sequence[int], samples: int) -> Iterator[LookupCoreRow]:
    """Look up chains in a directory of this process."""
    longest = _longest(sizes)
    directory = _directory(longest)
    chain = os.urandom(longest * HASH_BYTES)
    _fill(directory, chain, 0)
    look_up = partial(directory.match, NAMESPACE.id, lease_s=LEASE_S)
    for size in sizes:
        taken_s = times_s(look_up, chain[: size * HASH_BYTES], samples)
        yield LookupCoreRow(size=size, p50_us=rounded(percentile(taken_s, 50) * 1e6))


def measure_directory_memory(blocks: int) -> DirectoryMemoryRow:
    """Fill a directory in a fresh process and see how much that process grows."""
    blocks = at_least("memory blocks", blocks, MEMORY_CHAIN_BLOCKS) // MEMORY_CHAIN_BLOCKS * MEMORY_CHAIN_BLOCKS
    with child(report_growth, blocks) as filler:
        blocks_bytes, copies_bytes = map(int, heard(filler).split())
        return DirectoryMemoryRow(
            blocks=blocks,
            bytes_per_block=rounded(blocks_bytes / blocks),
            bytes_per_copy=rounded(copies_bytes / blocks),
        )


def report_growth(blocks: int) -> None:
    """In a child: fill a directory with chains, then copies, and say by how many bytes the process grew for each."""
    directory = _directory(blocks)
    _fill(directory, numbered_chain(0), 0)  # what the first use brings is no entry's
    directory.add_segment(_OTHER_SEGMENT, "other", int((blocks + MEMORY_CHAIN_BLOCKS) * PAGE_BYTES * HEADROOM))
    directory.set_accepting(_OTHER_SEGMENT, accepting=False)  # nothing is placed there; copies are announced
    _copy(directory, numbered_chain(0), 0)
    sizes_bytes = [_resident_bytes()]
    for put in (_fill, _copy):
        for slot in range(MEMORY_CHAIN_BLOCKS, MEMORY_CHAIN_BLOCKS + blocks, MEMORY_CHAIN_BLOCKS):
            put(directory, numbered_chain(slot), slot)
        sizes_bytes.append(_resident_bytes())
    say(" ".join(str(after - before) for before, after in itertools.pairwise(sizes_bytes)))


def _measure_via(via: str, sizes: Sequence[int], samples: int, meta: Mapping[str, Any]) -> Iterator[LookupRow]:
    longest = _longest(sizes)
    node_bytes = int(longest * PAGE_BYTES * HEADROOM)
    with (
        pool_processes(node_bytes, meta_unix=via == "unix", **meta) as pool,
        kvpool.connect(pool.uri, timeout_s=60.0) as client,
    ):
        keyspace = client.namespace(NAMESPACE)
        chain = store_chain(keyspace, longest)
        settle(pool.pids)
        for size in sizes:
            taken_s = times_s(partial(keyspace.match, lease_s=LEASE_S), chain[: size * HASH_BYTES], samples)
            yield LookupRow(
                size=size,
                p50_ms=rounded(percentile(taken_s, 50) * 1e3),
                p99_ms=rounded(percentile(taken_s, 99) * 1e3),
                keys_per_s=rounded(size * samples / sum(taken_s)),
                via=via,
            )


def _longest(sizes: Sequence[int]) -> int:
    for size in sizes:
        at_least("size", size)
    if max(sizes) > MATCH_BLOCKS_MAX:
        raise UsageError(f"size is {max(sizes)}; a look-up names at most {MATCH_BLOCKS_MAX} blocks")
    return max(sizes)


def times_s(look_up: Callable[[bytes], Match], hashes: bytes, samples: int) -> list[float]:
    """Times of ``samples`` look-ups, after a few that warm up; raises KvpoolError for a wrong answer."""
    size = len(hashes) // HASH_BYTES
    times_s = []
    for i in range(-(-samples // 10) + samples):
        began_ns = time.perf_counter_ns()
        blocks = look_up(hashes).blocks
        times_s.append((time.perf_counter_ns() - began_ns) / 1e9)
        if blocks != size:
            raise KvpoolError(f"look-up {i} found {blocks} of the {size} blocks that were stored")
    return times_s[-samples:]


def store_chain(keyspace: kvpool.Keyspace, blocks: int) -> bytes:
    """Store a new chain of so many blocks; its hashes. Raises KvpoolError when the pool does not take them all."""
    chain = os.urandom(blocks * HASH_BYTES)
    block = np.ones(PAGE_BYTES, np.uint8)
    for first in range(0, blocks, RESERVE_BLOCKS_MAX):
        count = min(RESERVE_BLOCKS_MAX, blocks - first)
        stored = keyspace.store(chain[: (first + count) * HASH_BYTES], [block] * count, first=first).stored
        if stored != count:
            raise KvpoolError(f"only {stored} of {count} blocks were stored")
    return chain


def _directory(blocks: int) -> Directory:
    directory = Directory(time.monotonic)
    directory.open_namespace(NAMESPACE)
    directory.add_segment(_SEGMENT, "bench", int((blocks + MEMORY_CHAIN_BLOCKS) * PAGE_BYTES * HEADROOM))
    return directory


def _fill(directory: Directory, chain: bytes, first_slot: int) -> None:
    """Reserve and commit a chain in slots from ``first_slot`` on, as clients and nodes would."""
    blocks = len(chain) // HASH_BYTES
    for first in range(0, blocks, RESERVE_BLOCKS_MAX):
        end = min(first + RESERVE_BLOCKS_MAX, blocks)
        reserved = directory.reserve(NAMESPACE.id, chain[: end * HASH_BYTES], first)
        checksums = np.frombuffer(os.urandom(8 * (end - first)), "<u8").tolist()
        slots = range(first_slot + first, first_slot + end)
        hashes = split_hashes(chain[first * HASH_BYTES : end * HASH_BYTES])
        written = [(h, 0, slot, slot + 1, c) for h, slot, c in zip(hashes, slots, checksums, strict=True)]
        directory.commit(reserved.reservation, _SEGMENT, written)


def numbered_chain(number: int) -> bytes:
    """The same hashes each time, so that nobody need keep them."""
    return hashlib.shake_256(number.to_bytes(8, "little")).digest(MEMORY_CHAIN_BLOCKS * HASH_BYTES)


def _copy(directory: Directory, chain: bytes, first_slot: int) -> None:
    """Another node has a copy of each block of the chain."""
    hashes = split_hashes(chain)
    parents = [b"", *hashes]
    announced = [
        AnnouncedBlock(block_hash, parents[i], 0, first_slot + i, i + 1, i) for i, block_hash in enumerate(hashes)
    ]
    directory.announce(_OTHER_SEGMENT, NAMESPACE.id, Inventory.of(announced))


def _resident_bytes() -> int:
    """Memory of this process, without garbage, nor the holes that columns leave in the heap when they grow and move."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
