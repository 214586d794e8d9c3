"""Look-ups where services share their state in Redis: how long they take, how many there are, what an entry costs.

Whole chains, all stored, as in `kvpool.bench.lookup`: through the framed protocol, and in the store alone. Services are
added one after the other over the same Redis; beside the rate stands what each process used of a core, which says what
limits it.
"""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import kvpool
from kvpool.bench import lookup
from kvpool.bench.lookup_rows import RATE_BLOCKS, SharedLookupRow, SharedMemoryRow, SharedRateRow, SharedRow
from kvpool.bench.measure import child, cpu_s, heard, percentile, pool_processes, rounded, say
from kvpool.bench.process import RoleProcess
from kvpool.bench.waiting import wait_until
from kvpool.core.directory import DirectoryConfig
from kvpool.core.errors import StateAwayError, UnavailableError
from kvpool.core.keys import split_hashes
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, RESERVE_BLOCKS_MAX, SEGMENT_ID_BYTES
from kvpool.meta.store.link import RedisLink
from kvpool.meta.store.pool import current_epoch
from kvpool.meta.store.redis import RedisStore

SERVICES = (1, 2, 3)
CLIENTS_PER_SERVICE = 2
RATE_S = 3.0
START_S = 10.0
CALL_S = 60.0
_SEGMENT = bytes(SEGMENT_ID_BYTES)


def measure_shared(state: str, sizes: Sequence[int], samples: int, memory_blocks: int) -> Iterator[SharedRow]:
    """All of it, in the Redis at the URL ``state``, whose keys are deleted; ``redis`` starts one here.

    Raises:
        KvpoolError: There is no Redis, or the pool does not find what it stored.
    """
    with contextlib.ExitStack() as stack:
        url, pid = stack.enter_context(_redis()) if state == "redis" else (state, None)
        for row in lookup.measure_lookup(sizes, samples, state=url):
            yield SharedLookupRow(size=row.size, p50_ms=row.p50_ms, p99_ms=row.p99_ms, via=row.via)
        yield from _measure_store(url, sizes, samples)
        if pid is not None:
            for services in SERVICES:
                yield _measure_rate(url, pid, services)
        if memory_blocks:
            yield _measure_memory(url, memory_blocks)


def look_up(uri: str, chain: bytes) -> None:
    """In a child: look a chain up for `RATE_S`, and say how often."""
    with kvpool.connect(uri, timeout_s=60.0) as client:
        keyspace = client.namespace(lookup.NAMESPACE)
        keyspace.match(chain)
        say("ready")
        heard_go = input()
        assert heard_go
        count, end_s = 0, time.monotonic() + RATE_S
        while time.monotonic() < end_s:
            count += keyspace.match(chain).blocks == len(chain) // HASH_BYTES
        say(count)


@contextlib.contextmanager
def _redis() -> Iterator[tuple[str, int]]:
    """A `redis-server` of this run alone, on a Unix socket and a free port; its URL and process."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        port = _free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        try:
            with (Path(folder) / "log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - as given above
        except OSError as error:
            raise UnavailableError("redis-server is not installed; name a server with --state redis://…") from error
        try:
            url = f"redis://127.0.0.1:{port}"
            if not wait_until(partial(_answers, url), START_S):
                raise UnavailableError("redis-server did not start")
            yield url, process.pid
        finally:
            process.terminate()
            process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _answers(url: str) -> bool:
    link = RedisLink(url, 1.0)
    try:
        link.run([("PING",)])
    except StateAwayError:
        return False
    finally:
        link.close()
    return True


def _empty_store(link: RedisLink, blocks: int) -> RedisStore:
    """A store with room for so many blocks, in a Redis that was emptied."""
    link.run([("FLUSHALL",)])
    store = RedisStore(link, current_epoch(link, os.urandom), DirectoryConfig())
    store.open_namespace(lookup.NAMESPACE)
    store.add_segment(_SEGMENT, "bench", int(blocks * PAGE_BYTES * lookup.HEADROOM))
    return store


def _put(store: RedisStore, chain: bytes, slot: int) -> None:
    """Reserve and commit a chain in slots from ``slot`` on."""
    hashes = split_hashes(chain)
    for first in range(0, len(hashes), RESERVE_BLOCKS_MAX):
        end = min(first + RESERVE_BLOCKS_MAX, len(hashes))
        reserved = store.reserve(lookup.NAMESPACE.id, chain[: end * HASH_BYTES], first)
        written = [(hashes[i], 0, slot + i, slot + i + 1, i) for i in range(first, end)]
        store.commit(reserved.reservation, _SEGMENT, written)


def _measure_store(url: str, sizes: Sequence[int], samples: int) -> Iterator[SharedLookupRow]:
    with contextlib.closing(RedisLink(url, CALL_S)) as link:
        chain = os.urandom(max(sizes) * HASH_BYTES)
        store = _empty_store(link, max(sizes))
        _put(store, chain, 0)
        ask = partial(store.match, lookup.NAMESPACE.id, lease_s=lookup.LEASE_S)
        for size in sizes:
            times_s = lookup.times_s(ask, chain[: size * HASH_BYTES], samples)
            yield SharedLookupRow(
                size=size,
                p50_ms=rounded(percentile(times_s, 50) * 1e3),
                p99_ms=rounded(percentile(times_s, 99) * 1e3),
                via="store alone",
            )


def _measure_rate(url: str, redis_pid: int, services: int) -> SharedRateRow:
    with contextlib.ExitStack() as stack:
        node_bytes = int(RATE_BLOCKS * PAGE_BYTES * 2)
        pool = stack.enter_context(pool_processes(node_bytes, state=url))
        uris, pids = [pool.uri], [pool.pids[0]]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        for i in range(1, services):
            options = {"grpc-port": 0, "framed-port": 0, "state": url}
            service = stack.enter_context(RoleProcess("meta", options, folder / f"meta-{i}.log"))
            uris.append(service.ready()["uri"])
            pids.append(service.pid)
        with kvpool.connect(pool.uri, timeout_s=60.0) as client:
            chain = lookup.store_chain(client.namespace(lookup.NAMESPACE), RATE_BLOCKS)
        wanted = [uri for uri in uris for _ in range(CLIENTS_PER_SERVICE)]
        clients = [stack.enter_context(child(look_up, uri, chain)) for uri in wanted]
        for process in clients:
            heard(process)
        used = [cpu_s([redis_pid]), cpu_s(pids)]
        for process in clients:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        count = sum(int(heard(process)) for process in clients)
        redis_s, services_s = cpu_s([redis_pid]) - used[0], cpu_s(pids) - used[1]
    return SharedRateRow(
        services=services,
        clients=len(wanted),
        lookups_per_s=rounded(count / RATE_S),
        redis_cores=rounded(redis_s / RATE_S),
        service_cores=rounded(services_s / RATE_S),
    )


def _measure_memory(url: str, blocks: int) -> SharedMemoryRow:
    with contextlib.closing(RedisLink(url, CALL_S)) as link:
        chains = max(1, blocks // lookup.MEMORY_CHAIN_BLOCKS)
        store = _empty_store(link, blocks)
        before = sum(int(info["used_memory"]) for info in link.servers())
        total = chains * lookup.MEMORY_CHAIN_BLOCKS
        for number in range(chains):
            _put(store, lookup.numbered_chain(number), number * lookup.MEMORY_CHAIN_BLOCKS)
        after = sum(int(info["used_memory"]) for info in link.servers())
        return SharedMemoryRow(blocks=total, bytes_per_block=rounded((after - before) / total))
