"""The client for asyncio: the same calls, each on a worker thread, so that there is no second implementation.

Copies and waits release the interpreter lock, so a call costs the event loop nothing while it runs. Cancelling a call
ends the wait for it; the call itself ends by its deadline, and its buffers must stay until then.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

from kvpool.client.buffers import Buffers
from kvpool.client.client import Client, connect
from kvpool.client.keyspace import Keyspace
from kvpool.client.results import ClientStats, LoadResult, Match, PoolStatus, StoreResult
from kvpool.core.keys import HashesLike
from kvpool.core.namespace import Namespace


class AsyncKeyspace:
    """`Keyspace`, awaited."""

    def __init__(self, keyspace: Keyspace) -> None:
        self.sync = keyspace
        """The same namespace, for code that blocks; it also has `reserve`, `write` and `abort`."""

    async def match(self, hashes: HashesLike, **options: Any) -> Match:  # noqa: ANN401 - as Keyspace.match
        """See `Keyspace.match`."""
        return await asyncio.to_thread(self.sync.match, hashes, **options)

    async def release(self, matched: Match, **options: Any) -> None:  # noqa: ANN401 - as Keyspace.release
        """See `Keyspace.release`."""
        await asyncio.to_thread(self.sync.release, matched, **options)

    async def load(self, hashes: HashesLike, buffers: Buffers, **options: Any) -> LoadResult:  # noqa: ANN401
        """See `Keyspace.load`."""
        return await asyncio.to_thread(self.sync.load, hashes, buffers, **options)

    async def store(self, hashes: HashesLike, buffers: Buffers, **options: Any) -> StoreResult:  # noqa: ANN401
        """See `Keyspace.store`."""
        return await asyncio.to_thread(self.sync.store, hashes, buffers, **options)


class AsyncClient:
    """`Client`, awaited; close it, or use it in an ``async with`` statement. Made by `connect_async`."""

    def __init__(self, client: Client) -> None:
        self.sync = client
        """The same client, for code that blocks."""

    async def namespace(self, namespace: Namespace, timeout_s: float | None = None) -> AsyncKeyspace:
        """See `Client.namespace`."""
        return AsyncKeyspace(await asyncio.to_thread(self.sync.namespace, namespace, timeout_s))

    async def status(self, timeout_s: float | None = None) -> PoolStatus:
        """See `Client.status`."""
        return await asyncio.to_thread(self.sync.status, timeout_s)

    def stats(self) -> ClientStats:
        """See `Client.stats`."""
        return self.sync.stats()

    async def close(self) -> None:
        """See `Client.close`."""
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
