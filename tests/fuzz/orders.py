"""What a metadata service may tell a node on its control stream: the node does it, or dials again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from google.protobuf.message import DecodeError

from kvpool.core.errors import KvpoolError
from kvpool.core.grants import Grant, seal
from kvpool.node.control import Control
from kvpool.node.copier import Copier
from kvpool.node.link import MetaLink
from kvpool.node.records import NodeSession
from kvpool.transport.wire.messages import PROTOCOL_VERSION
from kvpool.v1 import common_pb2, membership_pb2
from tests.fuzz.target import target
from tests.property.hostile_values import SEGMENTS
from tests.property.test_hostile_node import KEY, SOUND, Node


class Stream:
    """A control stream on which everything has been said already."""

    def __init__(self, said: list[membership_pb2.ToNode]) -> None:
        self._said = said

    def stream_stream(self, *described: object, **options: object) -> Callable[[object], "Stream"]:
        return lambda requests: self

    unary_unary = stream_stream

    def __iter__(self) -> Iterator[membership_pb2.ToNode]:
        return iter(self._said)

    def cancel(self) -> None:
        """It ends by itself."""


class Unconnected(MetaLink):
    """Its way for commits is not dialled: it is as if that had just broken."""

    def follow(self, session: NodeSession) -> None:
        """As if it had."""


def conversations() -> list[bytes]:
    """What a service says, each behind its length in two bytes."""
    welcome = {"incarnation": 1, "session": 2, "grant_key": KEY, "heartbeat_ms": 1000, "protocol": PROTOCOL_VERSION}
    free = {"number": [1], "segment_id": [SEGMENTS[0]], "slot": [2], "generation": [3], "rest": [True]}
    fetch = {
        "number": 2,
        "grant": seal(Grant(**SOUND), KEY),
        "source_node_id": "n1",
        "source_endpoints": ["inproc://x"],
    }
    fetch |= {"slot": [0, 1], "generation": [1, 2], "checksum": [9, 9], "source_segment_id": SEGMENTS[1]}
    said = [
        membership_pb2.ToNode(welcome=welcome),
        membership_pb2.ToNode(free_slots=free),
        membership_pb2.ToNode(fetch_blocks=fetch),
        membership_pb2.ToNode(mode={"draining": True}),
        membership_pb2.ToNode(ready={}),
        membership_pb2.ToNode(free_slots={}),
        membership_pb2.ToNode(free_slots={"number": [1]}),
        membership_pb2.ToNode(welcome=welcome | {"grant_key": bytes(65)}),
        membership_pb2.ToNode(welcome=welcome | {"heartbeat_ms": 0}),
    ]
    parts = [len(part).to_bytes(2, "little") + part for part in (event.SerializeToString() for event in said)]
    return [parts[0] + part for part in parts] + [b"".join(parts[:5])]


@target(conversations, growth_bytes_max=4 << 20)  # threads and their stacks of Python's
def service_orders(data: bytes) -> None:
    said = []
    while len(data) > 2:
        length = int.from_bytes(data[:2], "little")
        with suppress(DecodeError):
            said.append(membership_pb2.ToNode.FromString(data[2 : 2 + length]))
        data = data[2 + length :]
    with ExitStack() as stack:
        node = Node(stack)
        link = Unconnected("127.0.0.1:1", "n0")
        copier = Copier(node.store, link, "n0", ["inproc"])
        stack.callback(copier.stop)
        control = Control("n0", 1, [], node.store, link, common_pb2.Scrub, copier, lambda: None)
        with suppress(KvpoolError):
            control._one_session(Stream(said))
        with suppress(KvpoolError):
            node.prepare(owner=1)  # with the key that it was given
        node.check()
