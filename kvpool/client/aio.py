"""The client for asyncio: the same calls, each on a worker thread, so that there is no second implementation.

Copies and waits release the interpreter lock, so a call costs the event loop nothing while it runs. Cancelling a call
ends the wait for it; the call itself ends by its deadline, and its buffers must stay until then.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from kvpool.client.buffers import Buffers
from kvpool.client.client import Client, connect
from kvpool.client.keyspace import Keyspace
from kvpool.client.results import ClientStats, LoadResult, Match, PoolStatus, StoreResult
from kvpool.core.keys import HashesLike
from kvpool.core.namespace import Namespace

THREADS = 64
"""Calls of a client under way at a time; more wait, and the time they wait is of their own deadlines."""

LATE_S = 1e-6
"""A deadline that has passed: a call that gets it says at once what a late call says."""

Answer = TypeVar("Answer")


class _Calls:
    """Worker threads for a client's calls: each ends by its deadline, counted from when it was awaited."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(THREADS, "kvpool-aio")
        self._closed = False

    async def make(
        self,
        call: Callable[..., Answer],
        *args: object,
        timeout_s: float | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Answer:
        """Make ``call`` with what is left of ``timeout_s``."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if self._closed or not isinstance(limit_s, int | float) or limit_s <= 0:  # the call says so itself
            return await asyncio.to_thread(call, *args, timeout_s=limit_s, **options)
        began_s = time.monotonic()

        def run() -> Answer:
            waited_s = time.monotonic() - began_s
            return call(*args, timeout_s=max(limit_s - waited_s, LATE_S), **options)

        future = self._executor.submit(run)
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([waiting], timeout=limit_s)
        if not done and future.cancel():  # no thread came free in time
            return await asyncio.to_thread(call, *args, timeout_s=LATE_S, **options)
        return await waiting

    def close(self) -> None:
        """End the threads, once their calls have ended."""
        self._closed = True
        self._executor.shutdown(wait=False)


class AsyncKeyspace:
    """`Keyspace`, awaited."""

    def __init__(self, keyspace: Keyspace, calls: _Calls) -> None:
        self._calls = calls
        self.sync = keyspace
        """The same namespace, for code that blocks; it also has `reserve`, `write` and `abort`."""

    async def match(self, hashes: HashesLike, **options: Any) -> Match:  # noqa: ANN401 - as Keyspace.match
        """See `Keyspace.match`."""
        return await self._calls.make(self.sync.match, hashes, **options)

    async def release(self, matched: Match, **options: Any) -> None:  # noqa: ANN401 - as Keyspace.release
        """See `Keyspace.release`."""
        await self._calls.make(self.sync.release, matched, **options)

    async def load(self, hashes: HashesLike, buffers: Buffers, **options: Any) -> LoadResult:  # noqa: ANN401
        """See `Keyspace.load`."""
        return await self._calls.make(self.sync.load, hashes, buffers, **options)

    async def store(self, hashes: HashesLike, buffers: Buffers, **options: Any) -> StoreResult:  # noqa: ANN401
        """See `Keyspace.store`."""
        return await self._calls.make(self.sync.store, hashes, buffers, **options)


class AsyncClient:
    """`Client`, awaited; close it, or use it in an ``async with`` statement. Made by `connect_async`."""

    def __init__(self, client: Client) -> None:
        self._calls = _Calls(client.timeout_s)
        self.sync = client
        """The same client, for code that blocks."""

    async def namespace(self, namespace: Namespace, timeout_s: float | None = None) -> AsyncKeyspace:
        """See `Client.namespace`."""
        opened = await self._calls.make(self.sync.namespace, namespace, timeout_s=timeout_s)
        return AsyncKeyspace(opened, self._calls)

    async def status(self, timeout_s: float | None = None) -> PoolStatus:
        """See `Client.status`."""
        return await self._calls.make(self.sync.status, timeout_s=timeout_s)

    def stats(self) -> ClientStats:
        """See `Client.stats`."""
        return self.sync.stats()

    async def close(self) -> None:
        """See `Client.close`."""
        self._calls.close()
        await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def connect_async(uri: str = "grpc://127.0.0.1:7300", **options: Any) -> AsyncClient:  # noqa: ANN401
    """See `connect`; options are the same."""
    return AsyncClient(await asyncio.to_thread(connect, uri, **options))
