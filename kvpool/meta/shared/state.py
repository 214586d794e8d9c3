"""One epoch of the shared state, as one service works with it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kvpool.core.clock import Clock
from kvpool.core.directory import Segment
from kvpool.core.errors import UnavailableError
from kvpool.core.members import Member, MemberState
from kvpool.core.namespace import Namespace
from kvpool.core.recovery import Recovery
from kvpool.meta.directory_config import directory_config
from kvpool.meta.read_granting import ReadGranting
from kvpool.meta.shared.members import SharedMembers
from kvpool.meta.store.link import RedisLink
from kvpool.meta.store.pool import Epoch
from kvpool.meta.store.redis import RedisStore
from kvpool.ops.settings import MetaSettings


@dataclass(slots=True)
class State:
    """What belongs to one epoch; when that ends, all of it does.

    Attributes:
        epoch: Which.
        store: The directory.
        members: The nodes.
        recovery: When all that nodes hold is known; one for the whole pool, whichever services there are.
        reads: Seals read grants, for `SharedReads` alone, which knows whether nodes ask for any.
        sessions: Sessions whose nodes the recovery knows of, by node id, and whether they have reported.
    """

    epoch: Epoch
    store: RedisStore
    members: SharedMembers
    recovery: Recovery
    sessions: dict[str, tuple[int, bool]]
    reads: ReadGranting
    clock: Clock

    @classmethod
    def open(
        cls, link: RedisLink, epoch: Epoch, settings: MetaSettings, clock: Clock, random_bytes: Callable[[int], bytes]
    ) -> Self:
        """Begin to work with an epoch; raises StateAwayError."""
        store = RedisStore(link, epoch, directory_config(settings, 0))
        store.set_recovering(recovering=True)
        members = SharedMembers(link, epoch, clock, random_bytes)
        recovery = Recovery(clock, settings.expected_nodes, settings.recovery_wait_s, settings.recovery_deadline_s)
        store.pool.read_namespaces()
        first_version = int.from_bytes(random_bytes(6), "little") + 1
        reads = ReadGranting(members, epoch.number, clock, threading.Lock(), first_version)
        reads.is_on = True
        return cls(epoch, store, members, recovery, {}, reads, clock)

    def follow_recovery(self) -> bool:
        """Take in what nodes there are, and how far; whether the recovery ends here and now."""
        present = {member.node_id: member for member in self.members if member.state != MemberState.LOST}
        for node_id in self.sessions.keys() - present.keys():
            del self.sessions[node_id]
            self.recovery.left(node_id)
        for node_id, member in present.items():
            session, reported = self.sessions.get(node_id, (0, False))
            if session != member.session:
                self.recovery.joined(node_id)
                reported = False
            if member.state != MemberState.JOINING and not reported:
                self.recovery.reported(node_id)
                reported = True
            self.sessions[node_id] = (member.session, reported)
        if not self.recovery.active:
            return False
        key = f"{self.epoch.pool}recovered"
        by_others = self.store.link.run([("EXISTS", key)])[0]
        if not by_others and not self.recovery.ends():
            return False
        if by_others:
            self.recovery.end()
        self.store.link.run([("SET", key, 1)])
        self.store.set_recovering(recovering=False)
        return True

    # What grants are made of

    def segment(self, number: int) -> Segment:
        """The segment of a live node; raises UnavailableError when it has gone."""
        for member in self.members:
            if member.state != MemberState.LOST and number in member.numbers:
                own = member.segments[member.numbers.index(number)]
                return Segment(number, own.segment_id, member.node_id, own.capacity_bytes, own.medium)
        raise UnavailableError("a node has just left; reserve again")

    def get(self, node_id: str) -> Member | None:
        """See `Members.get`."""
        return self.members.get(node_id)

    def namespaces(self) -> list[Namespace]:
        """See `Directory.namespaces`."""
        return self.store.namespaces()
