"""Following a pool through a stream that loses, and a service that restarts: the follower's index ends up right.

The stream, the directory and the index are the real ones; the sockets between them are a list that loses messages.
"""

from collections.abc import Callable
from itertools import count

import pytest
from fake_node import SmallPool, chain, make_namespace
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvpool.core.directory import Pile
from kvpool.core.namespace import Namespace
from kvpool.events.index import Fit, PoolIndex
from kvpool.meta.events.stream import EventStream, Message
from kvpool.transport.wire.events import SnapshotPart, decode_batch, decode_part, encode

NAMESPACES = (make_namespace(), make_namespace(pages=2))
CHAINS = [chain(*tokens) for tokens in ((0, 0, 0, 0), (0, 0, 1), (0, 1, 0, 1, 0), (1, 0), (1, 1, 1))]
PAGES = 7
"""Far too little for `CHAINS`, so that most stores evict."""

REPLAY_BATCHES = 4
PART_ROWS = 3

picks = st.integers(0, 1_000_000)
names = st.sampled_from(NAMESPACES)


class Service:
    """What of a metadata service a follower has to do with."""

    def __init__(self, number: int, *, set_back: bool = False) -> None:
        self.number = number
        first_sequence = 1_000 + (-number if set_back else number)
        self.pool = SmallPool(PAGES, PAGES, namespaces=NAMESPACES)
        self.following = self.pool.directory.following
        self.following.begin(lambda: None)
        self.stream = EventStream(first_sequence, number, REPLAY_BATCHES, self.pool.clock)
        self.stream.learn(NAMESPACES)
        self.first = self.stream.begin()

    def visible(self) -> dict[bytes, set[bytes]]:
        """Without any event."""
        found = {n.id: {h for c in CHAINS for h in c if self.pool.visible([h], n) == [True]} for n in NAMESPACES}
        return {namespace: blocks for namespace, blocks in found.items() if blocks}


class FollowingMachine(RuleBasedStateMachine):
    """A pool that is used, and one who follows it as `Follower` does."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.service = Service(next(self.numbers))
        self.index = PoolIndex()
        self.wire = [self.service.first]

    def publish(self, arrives: Callable[[int], bool] = lambda _: True) -> None:
        messages = list(self.service.stream.advance(self.service.following.take()))
        self.wire += [message for i, message in enumerate(messages) if arrives(i)]

    # The pool

    @rule(pick=picks, namespace=names)
    def store(self, pick: int, namespace: Namespace) -> None:
        self.service.pool.store(CHAINS[pick % len(CHAINS)], namespace)
        self.service.pool.clock.advance(0.01)

    @rule(which=st.sampled_from((0, 1)))
    def lose_a_node(self, which: int) -> None:
        """And it is back, empty."""
        segment = self.service.pool.segments[which]
        self.service.pool.lose(segment.segment_id)
        segment.held.clear()
        self.service.pool.join(segment)

    @rule(returns=st.sampled_from((0, 1, 2)), set_back=st.booleans())
    def restart(self, returns: int, set_back: bool) -> None:
        """What was under way is lost; some of the nodes announce what they hold.

        Numbers overlap with those of earlier services: clocks are set back, or do not tell one start from the next.
        """
        before, self.service = self.service, Service(next(self.numbers), set_back=set_back)
        self.wire = [self.service.first]
        for old, segment in list(zip(before.pool.segments, self.service.pool.segments, strict=True))[:returns]:
            segment.held, segment.last_generation = dict(old.held), old.last_generation
            for namespace in NAMESPACES:
                held = [slot for slot in segment.held.values() if slot.namespace is namespace]
                if held:
                    self.service.pool.announce(segment, held)

    # The stream

    @rule(pick=picks)
    def publish_some(self, pick: int) -> None:
        """The rest does not fit a subscriber's queue."""
        self.publish(lambda i: bool(pick >> (i % 16) & 1))

    @rule()
    def lose_changes(self) -> None:
        """They came faster than they could be published."""
        lost = len(self.service.following.take().changes)
        if lost:
            self.wire += self.service.stream.advance(Pile(lost=lost))

    # The follower

    @rule(picks=st.lists(picks, max_size=6))
    def take_snapshot(self, picks: list[int]) -> None:
        """The pool is used on between its parts."""
        parts: list[SnapshotPart] = []
        following: int | None = 0
        while following is not None:
            self.publish()
            part = self.service.stream.part(self.service.following.visible(following, PART_ROWS))
            parts.append(decode_part(encode(part)))
            following = part.following
            if picks:
                pick = picks.pop()
                self.store(pick, NAMESPACES[pick % 2])
        self.index.restart(parts)

    @rule(most=st.integers(1, 8))
    def read(self, most: int) -> None:
        for _ in range(min(most, len(self.wire))):
            self.take(self.wire.pop(0))

    def take(self, message: Message) -> None:
        fit = self.index.fit(message.sequence)
        if fit is Fit.NEXT:
            self.index.advance(decode_batch(message.payload).events)
        elif fit is Fit.GAP:
            self.catch_up(message.sequence)

    def catch_up(self, sequence: int) -> None:
        for message in self.service.stream.since(self.index.expected):
            if self.index.fit(message.sequence) is Fit.NEXT:
                self.index.advance(decode_batch(message.payload).events)
        if self.index.expected <= sequence:
            self.take_snapshot([])

    @rule()
    def settle(self) -> None:
        """All that has arrived is read, and the service is asked how far it is: then the index is right."""
        self.publish(lambda _: False)
        self.read(len(self.wire))
        if self.index.incarnation != self.service.number:
            self.take_snapshot([])
        elif self.index.expected <= self.service.stream.sequence:
            self.catch_up(self.service.stream.sequence)
        assert self.index.namespaces == self.service.visible()

    def teardown(self) -> None:
        self.settle()


TestFollowing = pytest.mark.timeout(300)(FollowingMachine.TestCase)
FollowingMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
