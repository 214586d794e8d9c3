"""The packed columns that travel between a metadata service and its functions in Redis: numpy's view of lua/*.lua."""

import struct
from array import array
from collections.abc import Sequence

import numpy as np

from kvpool.core.directory import FreeSlot, Inventory, Location, MissReason
from kvpool.core.directory.writing import Committed
from kvpool.core.limits import HASH_BYTES

_CHOICE = struct.Struct("<HBdd16s")
_ORDER = struct.Struct("<dI8sB")
_WRITTEN = np.dtype([("hash", "V32"), ("shard", "<u2"), ("slot", "<u4"), ("generation", "<u8"), ("checksum", "<u8")])
_ANNOUNCED = np.dtype(
    [
        ("hash", "V32"),
        ("parent", "V32"),
        ("shard", "<u2"),
        ("slot", "<u4"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("age_us", "<f8"),
    ]
)
_PLACED = np.dtype(
    [
        ("block", "<i4"),
        ("shard", "<u2"),
        ("segment", "<u2"),
        ("slot", "<u4"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("links", "V12"),
    ]
)
_PLACED_OF_SEVERAL = np.dtype([("index", "<u4"), *((name, _PLACED[name]) for name in _PLACED.names or ())])


def pack_choice(number: int, capacity_bytes: int, others_bytes: int, segment_id: bytes, *, takes_new: bool) -> bytes:
    """A segment that blocks may be placed on; ``others_bytes``: what other namespaces use of it."""
    return _CHOICE.pack(number, takes_new, capacity_bytes, others_bytes, segment_id)


def pack_written(written: Sequence[Committed]) -> bytes:
    """Shards written, for `kvpool_commit`."""
    return np.array(list(written), _WRITTEN).tobytes()


def pack_inventory(part: Inventory) -> bytes:
    """Part of an inventory, for `kvpool_announce`."""
    table = np.zeros(len(part), _ANNOUNCED)
    table["hash"] = np.frombuffer(b"".join(part.hashes), "V32")
    parents = b"".join(parent or bytes(HASH_BYTES) for parent in part.parents)
    table["parent"] = np.frombuffer(parents, "V32")
    table["shard"], table["slot"] = part.shards, part.slots
    table["generation"], table["checksum"] = part.generations, part.checksums
    table["age_us"] = part.ages_s.astype(np.float64) * 1e6
    return table.tobytes()


def unpack_location(blocks: int, placed: bytes, shards: int, reason: MissReason | None) -> Location:
    """What `kvpool_locate` found of blocks with so many shards."""
    table = np.frombuffer(placed, _PLACED if shards == 1 else _PLACED_OF_SEVERAL)
    index = np.arange(len(table), dtype=np.uint32) if shards == 1 else table["index"]
    return Location(
        blocks=blocks,
        block=array("I", index.tobytes()),
        shard=array("H", table["shard"].tobytes()),
        segment=array("H", table["segment"].tobytes()),
        slot=array("I", table["slot"].tobytes()),
        generation=array("Q", table["generation"].tobytes()),
        checksum=array("Q", table["checksum"].tobytes()),
        reason=reason,
    )


def unpack_orders(packed: bytes, segment_id: bytes) -> list[FreeSlot]:
    """Orders to free slots of a segment, with their numbers in its outbox."""
    return [
        FreeSlot(int(number), segment_id, slot, int.from_bytes(generation, "little"), bool(rest))
        for number, slot, generation, rest in _ORDER.iter_unpack(packed)
    ]
