"""Blocks in memory that the processor cannot reach, by transports that cannot reach it either: through host memory."""

from dataclasses import replace

import numpy as np

from kvpool.core.limits import HASH_BYTES
from kvpool.transport import ReadBatch, Reading, ReadStatus, Transport
from kvpool.transport.blocks import Blocks, FarBlocks
from kvpool.transport.deadline import Deadline

STAGED_BYTES = 64 << 20
"""Read into host memory at a time."""


def begin_batch(transport: Transport, batch: ReadBatch, medium: str, deadline: Deadline) -> Reading:
    """`Transport.begin_read`, for any destinations; far ones are verified once more, over what arrived there."""
    far = batch.destinations
    if not isinstance(far, FarBlocks) or medium in transport.reaches_far:
        return transport.begin_read(batch, deadline)
    statuses = _through_host(transport, batch, far, deadline)
    return lambda: statuses


def _through_host(transport: Transport, batch: ReadBatch, far: FarBlocks, deadline: Deadline) -> bytearray:
    step = max(1, STAGED_BYTES // batch.block_bytes)
    staging = np.empty(min(step, len(far)) * batch.block_bytes, np.uint8)
    seeds, statuses = batch.seeds(), bytearray()
    for first in range(0, len(far), step):
        some = slice(first, min(first + step, len(far)))
        host = Blocks(batch.block_bytes, whole=staging[: (some.stop - first) * batch.block_bytes])
        read = transport.read(_part(batch, some, host), deadline)
        good = np.flatnonzero(np.frombuffer(read, np.uint8) == ReadStatus.OK)
        if len(good):
            blocks = (good + first).tolist()
            starts = good.astype(np.uint64) * np.uint64(batch.block_bytes)
            some_seeds = [seeds[block] for block in blocks]
            found = far.select(blocks).begin_load(staging, starts, some_seeds.copy, lasting=False)()
            for i, block, checksum in zip(good.tolist(), blocks, found.tolist(), strict=True):
                if checksum != batch.checksums[block]:
                    read[i] = ReadStatus.BAD
        statuses += read
    return statuses


def within_reach(sources: Blocks, reaches_far: frozenset[str], medium: str) -> Blocks:
    """``sources``, or a copy of them in host memory where a transport cannot move them to that medium."""
    if not isinstance(sources, FarBlocks) or medium in reaches_far:
        return sources
    count, length = len(sources), sources.block_bytes
    staging = np.empty(count * length, np.uint8)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(length)
    sources.begin_store(staging, starts, lambda: [0] * count, lasting=False)()
    return Blocks(length, whole=staging)


def _part(batch: ReadBatch, some: slice, destinations: Blocks) -> ReadBatch:
    return replace(
        batch,
        hashes=batch.hashes[some.start * HASH_BYTES : some.stop * HASH_BYTES],
        slots=batch.slots[some],
        generations=batch.generations[some],
        checksums=batch.checksums[some],
        destinations=destinations,
    )
