"""One block: asks the metadata service where it is and what holds it there."""

from dataclasses import dataclass

from kvpool.client.client import Client
from kvpool.client.explaining import owned
from kvpool.core.namespace import Namespace
from kvpool.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """One copy of one shard; ``slot`` is None while it is written, ``surplus`` says that it goes first."""

    node_id: str
    medium: str
    segment_id: str
    segment: int
    shard: int
    slot: int | None
    generation: int
    checksum: str
    surplus: bool


@dataclass(frozen=True, slots=True)
class BlockStatus:
    """One block of one namespace, as the directory has it.

    Attributes:
        namespace: Id (hex).
        state: in_flight, dormant (kept, not matched: an ancestor or a shard is missing) or visible.
        parent: Hash (hex) of the block above; empty for the first of a chain.
        children: Blocks right below, counted up to 100.
        block_bytes: Of one shard.
        slot_bytes: What that takes.
        idle_s: Since its last use. A use is noted on the deepest block alone.
        leases: Leases that end in it; those that end below it cover it too.
        leased_s: How long the last of them still runs.
        pinned: Whether it is pinned.
        pinned_s: For how long; None: until it is unpinned, or not at all.
        copies: Where it is.
    """

    namespace: str
    state: str
    parent: str
    children: int
    block_bytes: int
    slot_bytes: int
    idle_s: float
    leases: int
    leased_s: float
    pinned: bool
    pinned_s: float | None
    copies: tuple[CopyStatus, ...]


def find_block(client: Client, block_hash: bytes, where: Namespace | bytes | str | None) -> tuple[BlockStatus, ...]:
    """What is known of a block, in each namespace that has it; nothing is touched.

    Args:
        client: Its pool is asked.
        block_hash: 32 bytes.
        where: A namespace, the id of one, a model's name, or None for everywhere.

    Raises:
        UnknownNamespaceError: No namespace with this id is open.
        UnavailableError: The service cannot be reached.
    """
    answer = client._meta.block(_request(block_hash, owned(client, where)), client._deadline(None))
    return tuple(map(_block, answer.blocks))


def _request(block_hash: bytes, where: Namespace | bytes | str | None) -> admin_pb2.GetBlockRequest:
    if isinstance(where, Namespace):
        return admin_pb2.GetBlockRequest(hash=block_hash, document=where.document)
    if isinstance(where, bytes):
        return admin_pb2.GetBlockRequest(hash=block_hash, namespace=where)
    return admin_pb2.GetBlockRequest(hash=block_hash, model=where or "")


def _block(block: admin_pb2.Block) -> BlockStatus:
    return BlockStatus(
        namespace=block.namespace.hex(),
        state=block.state,
        parent=block.parent.hex(),
        children=block.children,
        block_bytes=block.block_bytes,
        slot_bytes=block.slot_bytes,
        idle_s=block.idle_s,
        leases=block.leases,
        leased_s=block.leased_s,
        pinned=block.pinned,
        pinned_s=block.pinned_s if block.HasField("pinned_s") else None,
        copies=tuple(map(_copy, block.copies)),
    )


def _copy(copy: admin_pb2.BlockCopy) -> CopyStatus:
    return CopyStatus(
        node_id=copy.node_id,
        medium=copy.medium,
        segment_id=copy.segment_id.hex(),
        segment=copy.segment,
        shard=copy.shard,
        slot=copy.slot if copy.HasField("slot") else None,
        generation=copy.generation,
        checksum=f"{copy.checksum:016x}",
        surplus=copy.surplus,
    )
