"""The way to the pool: opened in the background, so that an engine starts, and runs, without one."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import kvpool
from kvpool import Client, Keyspace, KvpoolError, Namespace, PoolStatus, UsageError
from kvpool.transport.backoff import full_jitter
from kvpool_connector.vllm.config import ConnectorConfig

RETRY_S = 1.0
"""Longest pause between attempts to reach the pool; engines that lost it together come back one by one."""

log = logging.getLogger("vllm.kvpool")


class PoolLink:
    """A keyspace of the pool, once it has been reached. Thread-safe; close it.

    Args:
        config: Where the pool is.
        namespace: Which namespace to open.
        principal: Who is calling, for the pool's logs.
        before: Called first, on the link's thread, e.g. to start a store node.
        opened: Called with the pool's status and the namespace as the pool has it, on the link's thread, when the pool
            has been reached. That namespace has the tenant that this process has proven to be of.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        namespace: Namespace,
        principal: str,
        before: Callable[[], object] | None = None,
        opened: Callable[[PoolStatus, Namespace], object] | None = None,
    ) -> None:
        self.namespace = namespace
        self._config = config
        self._principal = principal
        self._before = before
        self._opened = opened
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._keyspace: Keyspace | None = None
        self._client: Client | None = None
        self._thread = threading.Thread(target=self._run, name="kvpool-link", daemon=True)
        self._thread.start()

    @property
    def keyspace(self) -> Keyspace | None:
        """The namespace in the pool, or None while that has not been reached."""
        return self._keyspace

    def wait(self, timeout_s: float) -> Keyspace | None:
        """The namespace, waiting up to ``timeout_s`` for the pool."""
        self._ready.wait(timeout_s)
        return self._keyspace

    def close(self) -> None:
        """Close the connection; calls in flight end. Idempotent."""
        self._closed.set()
        self._ready.set()
        self._keyspace = None
        if self._client is not None:
            self._client.close()
        self._thread.join(timeout=2 * RETRY_S)

    def _run(self) -> None:
        if self._before is not None:
            self._guard(self._before)
        said = False
        while not self._closed.is_set():
            try:
                if self._connect():
                    return
            except UsageError as error:
                log.error("kvpool is not used: %s", error)  # noqa: TRY400 - the message says it all
                return
            except KvpoolError as error:
                if not said:
                    log.warning("kvpool is not reachable yet, the engine runs without it: %s", error)
                said = True
            self._closed.wait(full_jitter(RETRY_S))

    def _connect(self) -> bool:
        client = kvpool.connect(
            self._config.pool,
            transports=self._config.transports,
            streams=self._config.streams,
            principal=self._principal,
            tls=self._config.tls,
        )
        try:
            keyspace = client.namespace(self.namespace)
            status = _reached(client)
        except BaseException:
            client.close()
            raise
        self._client = client
        if self._closed.is_set():
            client.close()
            return True
        self._keyspace = keyspace
        self._ready.set()
        log.info("kvpool %s reached; namespace %s", self._config.pool, keyspace.namespace.id.hex()[:16])
        if self._opened is not None and status is not None:
            self._guard(partial(self._opened, status, keyspace.namespace))
        return True

    def _guard(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            log.exception("kvpool: a step of connecting failed; the engine goes on")


def _reached(client: Client) -> PoolStatus | None:
    """The pool's status, once its nodes have been connected to; None where that failed: they are when needed."""
    with suppress(KvpoolError):
        return client.status(reach=True)
    return None
