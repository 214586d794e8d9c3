"""The stream without its sockets: numbers messages, keeps the last ones for replays, and tells of the whole in parts.

Sequence numbers begin at the microseconds of the day and year of the start, and count messages. A later service begins
above all that an earlier one gave, so that a restart is a gap, whatever was missed meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvpool.core.directory import Part, Pile
from kvpool.core.namespace import Namespace
from kvpool.meta.events.encoding import batches_of, events_of
from kvpool.transport.wire.events import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    SnapshotPart,
    encode,
)

REPLAY_BYTES_MAX = 64 << 20
"""Messages kept for replays, however many they are."""


class Message(NamedTuple):
    """One message of the stream."""

    sequence: int
    payload: bytes


class EventStream:
    """What has been told, and what can be told again.

    Args:
        first_sequence: Of the first message.
        incarnation: Of the service.
        replay_batches: Messages kept.
        time_of_day: Seconds, for people who read messages.

    Attributes:
        sequence: Of the last message.
        blocks: How many blocks events were about.
        lost: Changes that were told to nobody, since they came faster than they could be told.
    """

    def __init__(
        self, first_sequence: int, incarnation: int, replay_batches: int, time_of_day: Callable[[], float]
    ) -> None:
        self.sequence = first_sequence - 1
        self.blocks = 0
        self.lost = 0
        self._incarnation = incarnation
        self._time_of_day = time_of_day
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self._kept_max = replay_batches
        self._namespaces: list[Namespace] = []

    @property
    def namespaces(self) -> int:
        """How many are known; more are given to `learn`."""
        return len(self._namespaces)

    def learn(self, namespaces: Sequence[Namespace]) -> None:
        """These were opened after those known."""
        self._namespaces += namespaces

    def begin(self) -> Message:
        """The first message: nothing that an earlier service told counts any more."""
        return self._message([AllBlocksCleared()])

    def advance(self, pile: Pile) -> Iterator[Message]:
        """The messages that tell of these changes."""
        if pile.lost:
            # A number that is never sent is a gap that no replay fills: whoever knows of snapshots asks for one. Those
            # who do not hear that nothing is there, and learn the rest as it is stored: misses, no wrong hits.
            self.lost += pile.lost
            self.sequence += 1
            self._kept.clear()
            self._kept_bytes = 0
            yield self._message([AllBlocksCleared()])
        for batch in batches_of(events_of(pile.changes, self._namespaces)):
            yield self._message(batch)
        self.blocks += len(pile.changes)

    def since(self, sequence: int) -> list[Message]:
        """The messages from ``sequence`` on that are still kept."""
        return [message for message in self._kept if message.sequence >= sequence]

    def part(self, part: Part) -> SnapshotPart:
        """A part of the whole, taken when all messages up to the last one had been made."""
        stored = [event for event in events_of(part.changes, self._namespaces) if isinstance(event, BlockStored)]
        return SnapshotPart(self._incarnation, self.sequence, stored, part.following)

    def _message(self, events: list[Event]) -> Message:
        self.sequence += 1
        message = Message(self.sequence, encode(EventBatch(self._time_of_day(), events)))
        self._kept.append(message)
        self._kept_bytes += len(message.payload)
        while len(self._kept) > self._kept_max or self._kept_bytes > REPLAY_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft().payload)
        return message
