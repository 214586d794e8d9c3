"""Why did it miss: asks the metadata service about the blocks of a request, a page at a time."""

from dataclasses import dataclass

from kvpool.client.client import Client
from kvpool.core.directory import MissReason
from kvpool.core.keys import HashesLike, hash_at, pack_hashes
from kvpool.core.limits import EXPLAIN_BLOCKS_MAX, HASH_BYTES, MATCH_BLOCKS_MAX
from kvpool.core.namespace import Namespace
from kvpool.v1 import admin_pb2

PAGE_BYTES = EXPLAIN_BLOCKS_MAX * HASH_BYTES


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """Why one block can or cannot be matched; what is not known, or makes no sense for the reason, is None or empty.

    Attributes:
        hash: The block (hex).
        reason: None when it can be matched.
        namespace: Id (hex) of the namespace this is about.
        cause: What made it leave; a `kvpool.core.directory.Cause`.
        nodes: Where it is, is being written, or was before it left.
        ago_s: Since it left, or was last used.
        idle_s: How long it had not been used when it left.
        fill: Used share of the pool's capacity when it left.
        owner: Who writes it, of a block in flight.
        deadline_s: Until its writer must have finished.
        missing: The nearest ancestor that is missing (hex).
        missing_reason: Why that is missing.
        elsewhere: Other namespaces (hex) that know the hash, each with the fields in which it differs.
    """

    hash: str
    reason: MissReason | None
    namespace: str
    cause: str
    nodes: tuple[str, ...]
    ago_s: float | None
    idle_s: float | None
    fill: float | None
    owner: str
    deadline_s: float | None
    missing: str
    missing_reason: str
    elsewhere: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Explained:
    """The blocks in the order asked, and how much the service can know at all.

    Attributes:
        blocks: One a hash.
        memory_s: Blocks that left longer ago than this may have been forgotten; None: none was.
        uptime_s: How long the metadata service has been running; it knows nothing from before.
        joining: Nodes that have not said yet what they hold.
    """

    blocks: tuple[BlockExplanation, ...]
    memory_s: float | None
    uptime_s: float
    joining: tuple[str, ...]


def explain(client: Client, hashes: HashesLike, where: Namespace | bytes | str | None) -> Explained:
    """Why each of some blocks can or cannot be matched, for people; nothing is touched.

    Args:
        client: Its pool is asked; the client's deadline holds for a page.
        hashes: The blocks, usually a request's chain.
        where: A namespace, the id of one, a model's name, or None for everywhere.

    Raises:
        InvalidHashError: A hash that is not 32 bytes long, or too many.
        UnknownNamespaceError: An id that is not open in the pool.
        UnavailableError: The service cannot be reached.
    """
    packed = pack_hashes(hashes, MATCH_BLOCKS_MAX)
    blocks: list[BlockExplanation] = []
    for start in range(0, len(packed), PAGE_BYTES):
        page = packed[start : start + PAGE_BYTES]
        answer = client._meta.explain(_request(page, owned(client, where)), client._deadline(None))
        blocks += [_block(hash_at(page, i), block) for i, block in enumerate(answer.blocks)]
    forgets = answer.memory_full and answer.HasField("memory_s")
    return Explained(tuple(blocks), answer.memory_s if forgets else None, answer.uptime_s, tuple(answer.joining))


def owned(client: Client, where: Namespace | bytes | str | None) -> Namespace | bytes | str | None:
    """The same place, a namespace's tenant filled in with the client's own."""
    return client._meta.owned(where) if isinstance(where, Namespace) else where


def _request(hashes: bytes, where: Namespace | bytes | str | None) -> admin_pb2.ExplainRequest:
    if isinstance(where, Namespace):
        return admin_pb2.ExplainRequest(hashes=hashes, document=where.document)
    if isinstance(where, bytes):
        return admin_pb2.ExplainRequest(hashes=hashes, namespace=where)
    return admin_pb2.ExplainRequest(hashes=hashes, model=where or "")


def _block(block_hash: bytes, said: admin_pb2.BlockExplanation) -> BlockExplanation:
    return BlockExplanation(
        hash=block_hash.hex(),
        reason=MissReason(said.reason) if said.reason else None,
        namespace=said.namespace.hex(),
        cause=said.cause,
        nodes=tuple(said.nodes),
        ago_s=said.ago_s if said.HasField("ago_s") else None,
        idle_s=said.idle_s if said.HasField("idle_s") else None,
        fill=said.fill if said.HasField("fill") else None,
        owner=said.owner,
        deadline_s=said.deadline_s if said.HasField("deadline_s") else None,
        missing=said.missing.hex(),
        missing_reason=said.missing_reason,
        elsewhere={other.namespace.hex(): tuple(other.differences) for other in said.elsewhere},
    )
