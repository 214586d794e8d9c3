"""Turns the directory's changes into events: runs of one chain become one event each."""

from collections.abc import Iterator, Sequence

from kvpool.core.directory import Changes
from kvpool.core.namespace import Namespace
from kvpool.transport.wire.events import BlockRemoved, BlockStored, Event, ownership

EVENTS_MAX = 256
"""Events of one message: an event is a few hundred bytes and its hashes."""

BLOCKS_MAX = 1024
"""Blocks of one message."""


def events_of(changes: Changes, namespaces: Sequence[Namespace]) -> Iterator[Event]:
    """The events of a pile or a part, in order."""
    hashes, parents, numbers = changes.hashes, changes.parents, changes.namespaces
    first = 0
    for i in range(1, len(hashes) + 1):
        if i < len(hashes) and numbers[i] == numbers[first] and i - first < BLOCKS_MAX:
            parent = parents[i]
            if (parents[first] is None) if parent is None else (parent == hashes[i - 1] and parents[i - 1] is not None):
                continue
        yield _event(namespaces[numbers[first]], hashes[first:i], parents[first])
        first = i


def batches_of(events: Iterator[Event]) -> Iterator[list[Event]]:
    """Events, as many at a time as one message has."""
    batch: list[Event] = []
    blocks = 0
    for event in events:
        size = len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 0
        if batch and (len(batch) == EVENTS_MAX or blocks + size > BLOCKS_MAX):
            yield batch
            batch, blocks = [], 0
        batch.append(event)
        blocks += size
    if batch:
        yield batch


def _event(namespace: Namespace, hashes: list[bytes], parent: bytes | None) -> Event:
    whose = ownership(namespace.id)
    if parent is None:
        return BlockRemoved(block_hashes=hashes, ownership=whose)
    return BlockStored(
        block_hashes=hashes, parent_block_hash=parent or None, block_size=namespace.block_tokens, ownership=whose
    )
