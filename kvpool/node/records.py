"""What a node's store and those round it hand to each other."""

import time
from dataclasses import dataclass, field

from kvpool.core.slots import Slot


@dataclass(frozen=True, slots=True)
class NodeSession:
    """The metadata service's session that the node obeys, and when it began, on this process's monotonic clock."""

    meta_incarnation: int
    session: int
    key: bytes
    began_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Receiving:
    """A slot whose bytes are being received: where to, and the seed of their checksum."""

    slot: Slot
    view: memoryview
    seed: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What was found of the slots of one read: a flag for each, and the bytes of those that are there."""

    present: bytearray
    views: list[memoryview]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts and bytes of one segment, at one moment."""

    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    retired_bytes: int
    largest_free_bytes: int
    slots: int
    counters: dict[str, int]
