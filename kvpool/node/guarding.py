"""What a node asks of whoever reads: a grant for the blocks' namespace, and for direct access that it is allowed here.

Without authentication it asks for nothing. A grant is opened once and then remembered, so that a read costs a look into
a table, and a block the comparison of its header's namespace.
"""

import time

from kvpool.core.clock import Clock
from kvpool.core.errors import ForbiddenError, KvpoolError, ProtocolError, SettingsError, StaleGrantError
from kvpool.core.namespace import parse_namespace
from kvpool.core.read_grants import open_read_grant
from kvpool.node.records import NodeSession
from kvpool.node.store import NodeStore

KNOWN_MAX = 4096
"""Grants remembered; when there are more, all are opened anew."""

SLACK_S = 2.0
"""How much longer than it says a grant opens: the service counted from a moment before this node did."""

MAPPING_OFF = "off"
MAPPING_ALL = "all"
_TENANT = "tenant:"


class Guard:
    """One node's. Thread-safe.

    Args:
        store: The node's.
        needs_grants: Whether callers are authenticated.
        mapping: See `NodeSettings.mapping`.
        clock: Monotonic seconds, those of the node's sessions.

    Attributes:
        refused: Reads refused for want of a grant, or with one that opened nothing.

    Raises:
        SettingsError: One tenant alone may map, and nobody is told from anybody.
    """

    def __init__(
        self, store: NodeStore, *, needs_grants: bool, mapping: str = MAPPING_ALL, clock: Clock = time.monotonic
    ) -> None:
        if mapping.startswith(_TENANT) and not needs_grants:
            raise SettingsError(
                f"node.mapping = {mapping!r}: without TLS no client is told from another; use all, or off, or --tls-dir"
            )
        self.refused = 0
        self._store = store
        self._needs_grants = needs_grants
        self._mapping = mapping
        self._clock = clock
        self._known: dict[bytes, tuple[NodeSession, bytes, float]] = {}

    def namespace(self, sealed: bytes) -> bytes | None:
        """The namespace whose blocks the bearer of a read grant may read; None: of all.

        Raises:
            ForbiddenError: There is no grant.
            StaleGrantError: It has run out, or opens nothing here.
        """
        if not self._needs_grants:
            return None
        session = self._store.read_session
        known = self._known.get(sealed)
        if known is None or known[0] is not session:
            known = self._open(sealed, session)
        if self._clock() > known[2]:
            self.refused += 1
            raise StaleGrantError("the read grant has run out; locate again")
        return known[1]

    def may_map(self, sealed: bytes) -> bool:
        """Whether the bearer of a read or write grant may reach the memory itself; raises as `namespace`."""
        if self._mapping == MAPPING_OFF:
            return False
        if not self._needs_grants:
            return True
        namespace_id = self._bearer(sealed)
        return self._mapping == MAPPING_ALL or self._tenant(namespace_id) == self._mapping.removeprefix(_TENANT)

    def may_map_unasked(self) -> bool:
        """Whether any process on this host, which the kernel says is the node's own user's, may map the memory."""
        return self._mapping == MAPPING_ALL

    def _bearer(self, sealed: bytes) -> bytes:
        """The namespace of a grant of either kind: who maps the memory reads there, or writes."""
        try:
            namespace_id = self.namespace(sealed)
        except StaleGrantError:
            try:
                return self._store.open_grant(sealed).namespace
            except ProtocolError as error:
                raise StaleGrantError(str(error)) from error
        assert namespace_id is not None, "asked only where grants are needed"
        return namespace_id

    def _tenant(self, namespace_id: bytes) -> str:
        """Whose blocks are in the namespace; empty when nobody can say."""
        try:
            self._store.book.learn(namespace_id)
            return parse_namespace(self._store.book.get(namespace_id) or b"").tenant
        except KvpoolError:
            return ""

    def _open(self, sealed: bytes, session: NodeSession | None) -> tuple[NodeSession, bytes, float]:
        if not sealed:
            self.refused += 1
            raise ForbiddenError("blocks are read under a read grant; the metadata service gives one with locate")
        try:
            if session is None:
                raise StaleGrantError("the node has not joined the metadata service; locate again")
            grant = open_read_grant(sealed, session.key)
            if (grant.incarnation, grant.session) != (session.meta_incarnation, session.session):
                raise StaleGrantError("the read grant is of another session; locate again")
        except StaleGrantError:
            self.refused += 1
            raise
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        known = self._known[sealed] = (session, grant.namespace, session.began_s + grant.until_ms / 1000 + SLACK_S)
        return known
