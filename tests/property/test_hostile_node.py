"""What writers and readers say to a store node: others' slots, wrong lengths, bytes that do not come.

It answers or refuses with an error of ours; slots and headers agree afterwards, and nothing is pinned or lost.
"""

import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpool.core.directory import CommitStatus
from kvpool.core.errors import KvpoolError, ProtocolError
from kvpool.core.grants import Grant, seal
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import Slots, SlotState
from kvpool.node.headers import HeaderFile
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.records import NodeSession
from kvpool.node.segment import ShmSegment
from kvpool.node.serving import DataSession
from kvpool.node.store import NodeStore
from kvpool.testing import ManualClock
from kvpool.transport.wire.framed import FramedSocket
from kvpool.transport.wire.messages import KINDS, Message, WriteRequest
from kvpool.transport.wire.payload import Payload

from .hostile_values import HASHES, NAMESPACE, RESERVED, SEGMENTS, UNKNOWN, answer, any_of, lying

KEY = b"k" * 32
PAGES = 6
SOUND = {"incarnation": 1, "session": 2, "reservation": RESERVED, "segment_id": SEGMENTS[0], "shard": 0}
SOUND |= {"namespace": NAMESPACE.id}
SOUND |= {"block_bytes": PAGE_BYTES, "ttl_ms": 1000, "hashes": HASHES[0] + HASHES[1], "parents": bytes(64)}
SOUND |= {"victim_slots": b"", "victim_generations": b""}
"""A grant for two blocks that the node takes."""


class Directory:
    """Takes every commit, as long as it is asked properly."""

    def commit(self, segment_id, reservation, headers) -> NDArray[np.uint8]:
        return np.full(len(headers), CommitStatus.STALE if reservation == 4 else CommitStatus.COMMITTED, np.uint8)

    def abort(self, reservation, hashes) -> None:
        assert hashes

    def gone(self, segment_id, headers) -> None:
        assert len(headers)

    def describe(self, namespace_id) -> bytes:
        if namespace_id == UNKNOWN.id:
            raise KvpoolError("not open")
        return NAMESPACE.document


class Node:
    """A store node without its wires: two connections, a local one and one over the network."""

    def __init__(self, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        segment = ShmSegment(directory / "payload", SEGMENTS[0], PAGES * PAGE_BYTES, "off")
        stack.callback(segment.close)
        self.headers = HeaderFile(directory / "headers", SEGMENTS[0], PAGES)
        stack.callback(self.headers.close)
        self.clock = ManualClock()
        self.slots = Slots(PAGES, self.clock)
        book = NamespaceBook(directory / "namespaces", Directory().describe)
        self.store = NodeStore(segment, self.headers, self.slots, book, Directory(), 1)
        self.store.session = NodeSession(1, 2, KEY)
        self.sessions = [DataSession(self.store, owner=i, local=not i) for i in range(2)]
        near, self.far = socket.socketpair()
        stack.enter_context(near)
        stack.enter_context(self.far)
        self.framed = FramedSocket(near)
        self.prepare(owner=0)
        slots, generations = self.prepare(owner=1)
        self.store.commit_slots(SEGMENTS[0], RESERVED, 1, slots, generations, np.zeros(len(slots), np.uint64))

    def prepare(self, owner: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        grant = Grant(**SOUND)
        return self.store.prepare(seal(grant, KEY), owner)

    def ask(self, session: DataSession, request: Message, payload: bytes) -> None:
        self.far.sendall(payload)
        left = Payload(self.framed, len(payload))
        if isinstance(answer(session, request, left), ProtocolError):
            session.closed()
        left.drop()

    def check(self) -> None:
        """Slots and headers agree, and no transfer holds a slot."""
        self.slots.check_integrity()
        assert all(not slot.pins and not slot.doomed for slot in self.slots)
        for state in (SlotState.WRITING, SlotState.COMMITTED):
            described = [(slot.page, slot.generation) for slot in self.slots if slot.state == state]
            assert self.headers.scan(state).named() == sorted(described)


@st.composite
def node_requests(draw) -> tuple[int, Message, bytes]:
    """(connection, request, its payload)."""
    grant = draw(lying(Grant, [2]))
    grant = msgspec.structs.replace(grant, **draw(st.sampled_from(({}, SOUND, SOUND, SOUND))))
    request = draw(any_of((kind for kind in KINDS.values() if kind.kind % 2 == 0 and kind.kind >= 30), [2]))
    if hasattr(request, "grant"):
        request = msgspec.structs.replace(request, grant=seal(grant, KEY))
    length = draw(st.sampled_from((PAGE_BYTES, PAGE_BYTES, 0, 1)))
    count = len(request.slots) // 4 if isinstance(request, WriteRequest) else draw(st.sampled_from((0, 0, 1)))
    return draw(st.integers(0, 1)), request, bytes(min(4, count) * length)


@given(st.lists(node_requests(), min_size=1, max_size=10))
def test_a_node_answers_or_refuses_whatever_a_writer_or_reader_says(said):
    with ExitStack() as stack:
        node = Node(stack)
        for connection, request, payload in said:
            node.ask(node.sessions[connection], request, payload)
            node.check()

        for session in node.sessions:
            session.closed()
        node.check()
        assert all(slot.state != SlotState.WRITING for slot in node.slots)
