"""A whole pool in this process: one metadata service and its nodes, on loopback. What `kvpool up` runs."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kvpool.client import Client, connect
from kvpool.client.client import DEFAULT_TRANSPORTS
from kvpool.meta import MetaServer
from kvpool.node import NodeServer
from kvpool.ops.settings import MetaSettings, NodeSettings, TlsSettings


class EmbeddedPool:
    """Starts with the ``with`` statement, or `start`, and leaves nothing behind when it ends.

    Args:
        meta: The metadata service.
        nodes: The nodes; their ``meta`` is replaced by where the service listens.
        tls: A folder with certificates of them all; without one the pool speaks plaintext.
    """

    def __init__(self, meta: MetaSettings, *nodes: NodeSettings, tls: TlsSettings | None = None) -> None:
        self._tls = tls
        expected = meta.expected_nodes or len(nodes)
        self.meta = MetaServer(meta.model_copy(update={"expected_nodes": expected}), tls)
        self.nodes: list[NodeServer] = []
        self._node_settings = nodes
        self._running = ExitStack()

    @property
    def uri(self) -> str:
        """Where the pool is reached, by this process and others."""
        return self.meta.uri

    def start(self) -> None:
        """Start all parts; raises what `MetaServer.start` and `NodeServer.start` do, with nothing left running."""
        with ExitStack() as undo:
            self.meta.start()
            undo.callback(self.meta.stop)
            for settings in self._node_settings:
                node = NodeServer(settings.model_copy(update={"meta": self.uri}), tls=self._tls)
                node.start()
                undo.callback(node.stop)
                self.nodes.append(node)
            self._running = undo.pop_all()

    def stop(self) -> None:
        """Stop all parts, nodes first."""
        self._running.close()
        self.nodes.clear()

    def connect(self, *, transports: Sequence[str] = DEFAULT_TRANSPORTS, timeout_s: float = 5.0) -> Client:
        """A client of this pool; options as for `kvpool.connect`."""
        return connect(self.uri, transports=transports, timeout_s=timeout_s, tls=self._tls)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
