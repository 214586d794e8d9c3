"""What `kvpool bench lookup --state redis` says: records, without what measuring needs."""

import msgspec

SHARED_TARGETS_MS = {4_096: 1.5}
"""Most p50 milliseconds, on loopback, by the size of the chain."""

SHARED_TARGET_BYTES = 400
RATE_BLOCKS = 512


class SharedLookupRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="shared_lookup"):
    """Look-ups of a whole chain of ``size`` blocks, through a service or in the store ``via`` alone."""

    size: int
    p50_ms: float
    p99_ms: float
    via: str


class SharedRateRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="shared_rate"):
    """Look-ups of `RATE_BLOCKS` blocks a second by the clients of so many services; the cores that each part used."""

    services: int
    clients: int
    lookups_per_s: float
    redis_cores: float
    service_cores: float


class SharedMemoryRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="shared_memory"):
    """Growth of Redis's memory while it took ``blocks`` blocks of one shard, in chains."""

    blocks: int
    bytes_per_block: float


SharedRow = SharedLookupRow | SharedRateRow | SharedMemoryRow
