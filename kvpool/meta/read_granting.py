"""Read grants for clients: all nodes' for a namespace, sealed anew now and then, told to those who have older ones."""

import threading
from collections.abc import Iterator
from typing import Protocol

from kvpool.core.clock import Clock
from kvpool.core.members import Member, MemberState
from kvpool.core.read_grants import READ_GRANT_S, RENEWED_S, ReadGrant, seal_read_grant
from kvpool.transport.wire.messages import NodeGrant, ReadGrants


class Sessions(Protocol):
    """See `Members`."""

    version: int

    def __iter__(self) -> Iterator[Member]: ...


class ReadGranting:
    """Seals read grants. Thread-safe.

    Args:
        members: The nodes, with their sessions and keys; guarded by ``lock``.
        incarnation: Of the service.
        clock: Monotonic seconds.
        lock: The service's; not held by callers, but for `grant`.
        first_version: Random, so that no client takes another service's grants, or an earlier one's, for what it has.

    Attributes:
        is_on: Whether nodes ask for grants: where callers are authenticated. Without it nobody is given any.
    """

    def __init__(
        self, members: Sessions, incarnation: int, clock: Clock, lock: threading.Lock, first_version: int
    ) -> None:
        self.is_on = False
        self._members = members
        self._incarnation = incarnation
        self._clock = clock
        self._lock = lock
        self._stamp = (0, 0)
        self._version = first_version
        self._latest: dict[bytes, ReadGrants] = {}

    def since(self, namespace_id: bytes, known_version: int) -> ReadGrants | None:
        """The grants for a namespace, or None when the caller's version is the current one, or nobody needs any."""
        if not self.is_on:
            return None
        with self._lock:
            stamp = (self._members.version, int(self._clock() / RENEWED_S))
            if stamp != self._stamp:
                self._stamp = stamp
                self._version += 1
                self._latest.clear()
            if known_version == self._version:
                return None
            found = self._latest.get(namespace_id)
            if found is None:
                found = self._latest[namespace_id] = ReadGrants(self._version, self._all(namespace_id))
        return found

    def grant(self, member: Member, namespace_id: bytes) -> bytes:
        """One for a node's blocks of a namespace; empty where nobody needs any. The caller holds the lock."""
        if not self.is_on:
            return b""
        until_s = self._clock() - member.since_s + READ_GRANT_S
        return seal_read_grant(
            ReadGrant(self._incarnation, member.session, namespace_id, int(until_s * 1000)), member.key
        )

    def _all(self, namespace_id: bytes) -> list[NodeGrant]:
        return [
            NodeGrant(member.incarnation, self.grant(member, namespace_id))
            for member in self._members
            if member.state != MemberState.LOST
        ]
