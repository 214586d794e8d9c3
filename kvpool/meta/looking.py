"""What people look at, asked of the service in parts that hold it for a moment each, and told over the wire."""

import math
from collections.abc import Iterable
from functools import partial

from kvpool.core.directory import BlockView, NamespaceUsage
from kvpool.core.members import Member
from kvpool.meta.serving import Serving
from kvpool.meta.store.base import Store
from kvpool.v1 import admin_pb2

NAMESPACES_AT_ONCE = 256
"""How many are asked for while the service is held: less than a millisecond."""


def namespace_usage(service: Serving) -> list[NamespaceUsage]:
    """What each namespace holds, oldest first."""
    found: list[NamespaceUsage] = []
    while True:
        part = service.ask(partial(_usage, len(found)))
        found += part
        if len(part) < NAMESPACES_AT_ONCE:
            return found


def _usage(begin: int, directory: Store, _: Iterable[Member]) -> list[NamespaceUsage]:
    return directory.view.usage(begin, NAMESPACES_AT_ONCE)


def find_block(
    namespaces: Iterable[bytes], block_hash: bytes, directory: Store, _: Iterable[Member]
) -> list[BlockView]:
    """What each of the open namespaces has of the block; a question for `MetaService.ask`."""
    view = directory.view
    found = (view.block(namespace_id, block_hash) for namespace_id in namespaces)
    return [block for block in found if block is not None]


def block_message(block: BlockView) -> admin_pb2.Block:
    """The same, as gRPC tells it."""
    return admin_pb2.Block(
        namespace=block.namespace.id,
        state=block.state.name.lower(),
        parent=block.parent,
        children=block.children,
        block_bytes=block.namespace.block_bytes,
        slot_bytes=block.slot_bytes,
        idle_s=block.idle_s,
        leases=block.leases,
        leased_s=block.leased_s,
        pinned=block.pinned_s > 0,
        pinned_s=block.pinned_s if 0 < block.pinned_s < math.inf else None,
        copies=[
            admin_pb2.BlockCopy(
                node_id=copy.node_id,
                medium=copy.medium,
                segment_id=copy.segment_id,
                segment=copy.segment,
                shard=copy.shard,
                slot=copy.slot,
                generation=copy.generation,
                checksum=copy.checksum,
                surplus=copy.surplus,
            )
            for copy in block.copies
        ],
    )
