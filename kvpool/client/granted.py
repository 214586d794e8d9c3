"""The read grants that a client has for a namespace: one for each node, renewed by the answers of the service."""

from kvpool.transport.wire.messages import ReadGrants


class GrantBook:
    """The latest grants, by node incarnation. Thread-safe: what it holds is replaced, never changed."""

    def __init__(self) -> None:
        self._latest: tuple[int, dict[int, bytes]] = (0, {})

    @property
    def version(self) -> int:
        """Which grants these are, for the service to say what is newer; 0: none."""
        return self._latest[0]

    def of(self, incarnation: int) -> bytes:
        """The grant for a node; empty where there is none, and none may be needed."""
        return self._latest[1].get(incarnation, b"")

    def learn(self, grants: ReadGrants | None) -> None:
        """Keep what came with an answer."""
        if grants is not None:
            self._latest = (grants.version, {node.incarnation: node.grant for node in grants.nodes})

    def forget(self) -> None:
        """They open nothing any more: the next answer brings new ones."""
        self._latest = (0, {})
