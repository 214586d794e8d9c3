"""The messages of the `ucx` transport: between client and node, and between either and its own UCX process.

Packed arrays as in `wire.messages`. Pages are of `PAGE_BYTES`, counted from the start of a region. An ``agent`` is what
NIXL needs to reach a process and read its region: addresses, and keys to that region alone. It travels once, when two
processes meet, and says only where the sender's own memory may be read.
"""

from kvpool.transport.wire.messages import Message

AGENT_BYTES_MAX = 64 << 10
"""Longest ``agent`` taken from a peer: it has about a hundred bytes for each device."""


class OfferRequest(Message, frozen=True):
    """Ask a node how its segment can be read, with a read grant."""

    kind = 42
    segment_id: bytes
    grant: bytes = b""


class Region(Message, frozen=True):
    """Memory that whoever has ``agent`` can read: its address there and its size; `NOT_MAPPED` if it lies on disk."""

    kind = 43
    agent: bytes
    address: int
    size_bytes: int


class RegisterRequest(Message, frozen=True):
    """The writer's region, which `PullRequest`s of this connection read from. Answered by Done."""

    kind = 44
    agent: bytes
    address: int
    size_bytes: int


class PullRequest(Message, frozen=True):
    """Read blocks out of the writer's region into prepared slots, and commit them. Answered by Statuses of WriteStatus.

    ``pages`` (uint32) are the first page of each block there. The node checks every checksum over the slot before it
    commits it.
    """

    kind = 46
    segment_id: bytes
    reservation: int
    slots: bytes
    generations: bytes
    checksums: bytes
    pages: bytes


class RegionRequest(Message, frozen=True):
    """Ask a UCX process for its own Region."""

    kind = 50


class PeerRequest(Message, frozen=True):
    """Make another process's region known to a UCX process."""

    kind = 52
    agent: bytes
    address: int
    size_bytes: int


class PeerReply(Message, frozen=True):
    """The peer's number; ``carrier`` as in TransferReply."""

    kind = 53
    number: int
    carrier: str


class ForgetRequest(Message, frozen=True):
    """The other end of a PeerRequest. Answered by Done."""

    kind = 54
    peer: int


class TransferRequest(Message, frozen=True):
    """Read blocks of ``pages_each`` pages from the peer's ``theirs`` into ``ours`` (first pages, uint32 each)."""

    kind = 56
    peer: int
    pages_each: int
    ours: bytes
    theirs: bytes


class TransferReply(Message, frozen=True):
    """All bytes have arrived. ``carrier`` is what UCX moves them over, or empty when it does not say."""

    kind = 57
    carrier: str
