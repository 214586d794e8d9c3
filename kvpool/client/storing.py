"""Storing: write a reservation's blocks to each of its segments by their nodes' transports."""

from typing import TYPE_CHECKING

from kvpool.client.results import Reservation, StoreResult, WriteResult
from kvpool.core.directory import Want
from kvpool.core.errors import KvpoolError
from kvpool.core.limits import HASH_BYTES
from kvpool.transport import WriteBatch, WriteStatus
from kvpool.transport.base import Pieces
from kvpool.transport.deadline import Deadline
from kvpool.transport.wire.messages import SegmentGrant, unpack

if TYPE_CHECKING:
    from kvpool.client.keyspace import Keyspace


def write_shard(
    keyspace: "Keyspace", reservation: Reservation, sources: list[Pieces], shard: int, deadline: Deadline
) -> WriteResult:
    """See `Keyspace.write`."""
    committed: list[int] = []
    failed: list[int] = []
    for grant in reservation.grants:
        if grant.shard != shard:
            continue
        blocks = unpack("blocks", grant.blocks, "<u4", len(grant.blocks) // 4).tolist()
        statuses = _write_grant(keyspace, reservation, grant, [sources[b] for b in blocks], blocks, deadline)
        for block, status in zip(blocks, statuses, strict=True):
            (committed if status == WriteStatus.COMMITTED else failed).append(block)
    return WriteResult(tuple(committed), tuple(failed))


def store_result(keyspace: "Keyspace", reservation: Reservation, written: WriteResult) -> StoreResult:
    """The sum of what a store did."""
    wants = reservation.wants
    refused = wants.count(Want.NO_ROOM) + len(written.failed)
    if reservation.missing_from is not None:
        refused = len(reservation.hashes) // HASH_BYTES
    keyspace.client.counters.refused(refused)
    return StoreResult(
        stored=len(written.committed),
        existing=wants.count(Want.EXISTS),
        in_flight=wants.count(Want.IN_FLIGHT),
        refused=refused,
        missing_from=reservation.missing_from,
        size_bytes=len(written.committed) * keyspace.namespace.block_bytes,
    )


def _write_grant(
    keyspace: "Keyspace",
    reservation: Reservation,
    grant: SegmentGrant,
    sources: list[Pieces],
    blocks: list[int],
    deadline: Deadline,
) -> bytes | bytearray:
    client, namespace = keyspace.client, keyspace.namespace
    try:
        node, segment = client.nodes.find(grant.segment, client.meta.topology)
        transport = client.nodes.transport(node, deadline)
        batch = WriteBatch(
            grant=grant.grant,
            reservation=reservation.number,
            segment_id=segment.segment_id,
            namespace_seed=namespace.seed,
            block_bytes=namespace.block_bytes,
            shard=grant.shard,
            hashes=b"".join(reservation.hashes[b * HASH_BYTES : (b + 1) * HASH_BYTES] for b in blocks),
            sources=sources,
        )
        statuses = transport.write(batch, deadline)
    except KvpoolError:
        return bytes([WriteStatus.FAILED]) * len(blocks)
    client.counters.stored(transport.name, statuses.count(WriteStatus.COMMITTED) * namespace.block_bytes)
    return statuses
