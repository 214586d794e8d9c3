"""Every limit on what comes from outside, in one place; each is checked before anything is allocated."""

HASH_BYTES = 32
"""Length of a block hash: as the engine made it, never truncated."""

NAMESPACE_ID_BYTES = 32
SEGMENT_ID_BYTES = 16

MATCH_BLOCKS_MAX = 65_536
"""Blocks in one match or locate: 1M tokens at 16 tokens a block."""

RESERVE_BLOCKS_MAX = 4_096
"""Blocks in one reserve, prepare or commit: bounds how long one call holds the directory."""

ANNOUNCE_BLOCKS_MAX = 16_384
"""Blocks in one part of an inventory."""

EXPLAIN_BLOCKS_MAX = 256
"""Blocks in one call that asks why: each is looked for in all namespaces."""

SLOTS_PER_CALL_MAX = 16 * RESERVE_BLOCKS_MAX
"""Slots in one read or write of the data plane: a whole match of small blocks in one exchange."""

STREAMS_MAX = 64
"""Threads or connections of one transfer."""

SHARDS_MAX = 256
REPLICAS_MAX = 16
BLOCK_BYTES_MAX = 1 << 30
NAMESPACES_MAX = 4_096
SEGMENTS_MAX = 65_000
NO_NUMBER = 0xFFFF_FFFF
"""Stands for the number of a segment that the directory does not know."""
NAMESPACE_DOCUMENT_BYTES_MAX = 16_384

FRAME_BODY_BYTES_MAX = 4 << 20
FRAME_PAYLOAD_BYTES_MAX = 1 << 30

LEASE_S_MAX = 60.0
RESERVATION_S_MAX = 600.0
DEADLINE_S_MAX = 600.0
DRAIN_S_MAX = 86_400.0

PAGE_BYTES = 4_096
"""Slots begin and end on pages, so that they can be mapped, locked and registered alone."""
