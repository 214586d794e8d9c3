"""Turns the directory's changes into events: runs of one chain become one event each."""

from collections.abc import Iterator, Sequence

from kvpool.core.directory import Change
from kvpool.core.namespace import Namespace
from kvpool.transport.wire.events import BlockRemoved, BlockStored, Event, ownership

EVENTS_MAX = 256
"""Events of one message: an event is a few hundred bytes and its hashes."""

BLOCKS_MAX = 1024
"""Blocks of one message."""


def events_of(changes: Sequence[Change], namespaces: Sequence[Namespace]) -> Iterator[Event]:
    """The events of a pile or a part, in order."""
    run: list[bytes] = []
    number, above, is_stored = -1, b"", False
    every = iter(changes)
    for namespace, block_hash, parent in zip(every, every, every, strict=True):
        assert isinstance(namespace, int)
        assert isinstance(block_hash, bytes)
        follows = parent == run[-1] if is_stored and run else parent is None
        if namespace != number or is_stored != (parent is not None) or not follows or len(run) == BLOCKS_MAX:
            if run:
                yield _event(namespaces[number], run, above, is_stored=is_stored)
            run, number, is_stored = [], namespace, parent is not None
            above = parent if isinstance(parent, bytes) else b""
        run.append(block_hash)
    if run:
        yield _event(namespaces[number], run, above, is_stored=is_stored)


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


def _event(namespace: Namespace, hashes: list[bytes], above: bytes, *, is_stored: bool) -> Event:
    whose = ownership(namespace.id)
    if not is_stored:
        return BlockRemoved(block_hashes=hashes, ownership=whose)
    return BlockStored(
        block_hashes=hashes, parent_block_hash=above or None, block_size=namespace.block_tokens, ownership=whose
    )
