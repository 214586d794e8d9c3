"""Slot headers: what each slot holds, in a file that only the node maps, so that slots describe themselves.

The file is one 64-byte prologue and one record for each page of the payload; the record of a slot's first page is its
header. All of it (3.7 % of the payload) is allocated when it is made: a record that finds memory full later would be the
end of the process, since writes to a mapping cannot fail otherwise. Little-endian:

    prologue  magic 8s | version u32 | record size u32 | pages u64 | segment id 16s | next generation u64 | pad
    record    state u32 | shard u32 | length u64 | generation u64 | namespace 32s | hash 32s | parent 32s |
              payload checksum u64 | header checksum u64 (xxh3-64 of all before it but the state)

The state is written last when a slot is filled and first when it is freed.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.core.units import format_size

MAGIC = b"KVPOOLHD"
VERSION = 1
_PROLOGUE = struct.Struct("<8sIIQ16sQ16x")
_STATE = struct.Struct("<I")
_IDENTITY = struct.Struct("<IQQ32s32s32sQ")
_CHECKSUM = struct.Struct("<Q")
RECORD_BYTES = _STATE.size + _IDENTITY.size + _CHECKSUM.size
GENERATIONS_RESERVED = 1 << 20
"""The prologue runs ahead of the generations given out, so that a crash cannot make one be given twice."""

ROOT_PARENT = bytes(32)
"""Stands in a header for "no parent"."""


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds."""

    page: int
    shard: int
    length: int
    generation: int
    namespace: bytes
    hash: bytes
    parent: bytes
    checksum: int

    @property
    def pages(self) -> int:
        """Pages the slot takes."""
        return -(-self.length // PAGE_BYTES)


def stored_segment_id(path: Path, pages: int) -> bytes | None:
    """The segment id in a header file for ``pages`` pages; None when there is no such file."""
    if not path.exists() or path.stat().st_size != _PROLOGUE.size + pages * RECORD_BYTES:
        return None
    with path.open("rb") as file:
        magic, version, record_bytes, stored_pages, segment_id, _ = _PROLOGUE.unpack(file.read(_PROLOGUE.size))
    sound = (magic, version, record_bytes, stored_pages) == (MAGIC, VERSION, RECORD_BYTES, pages)
    return segment_id if sound else None


class HeaderFile:
    """The header file of a segment; owns its mapping until `close`.

    Args:
        path: Made when absent. A file of another segment, size or version is refused.
        segment_id: The segment it belongs to.
        pages: Pages of the payload.

    Raises:
        CapacityError: The file cannot be made, or belongs to something else.
    """

    def __init__(self, path: Path, segment_id: bytes, pages: int) -> None:
        self.pages = pages
        self._segment_id = segment_id
        size_bytes = _PROLOGUE.size + pages * RECORD_BYTES
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CapacityError(f"cannot keep headers in {path}: {error}; choose another segment_dir") from error
        try:
            fresh = os.fstat(descriptor).st_size == 0
            if not fresh and os.fstat(descriptor).st_size != size_bytes:
                raise CapacityError(f"{path} belongs to a segment of another size; remove it to start empty")
            _allocate(descriptor, path, size_bytes)
            self._map = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self.next_generation = 1 if fresh else self._read_prologue(path)
        self._reserved = 0
        self.reserve_generations(self.next_generation)

    def reserve_generations(self, next_generation: int) -> None:
        """Make sure that a restart begins above ``next_generation``."""
        if next_generation < self._reserved:
            return
        self._reserved = next_generation + GENERATIONS_RESERVED
        prologue = (MAGIC, VERSION, RECORD_BYTES, self.pages, self._segment_id, self._reserved)
        _PROLOGUE.pack_into(self._map, 0, *prologue)

    def write(self, header: SlotHeader, state: SlotState) -> None:
        """Describe a slot."""
        start = _PROLOGUE.size + header.page * RECORD_BYTES
        identity = _IDENTITY.pack(
            header.shard,
            header.length,
            header.generation,
            header.namespace,
            header.hash,
            header.parent,
            header.checksum,
        )
        record = identity + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(identity))
        self._map[start + _STATE.size : start + RECORD_BYTES] = record
        _STATE.pack_into(self._map, start, state)

    def clear(self, page: int) -> None:
        """The slot is free."""
        _STATE.pack_into(self._map, _PROLOGUE.size + page * RECORD_BYTES, 0)

    def scan(self) -> Iterator[tuple[SlotHeader, SlotState]]:
        """Every slot the file describes soundly, in page order; records with a wrong checksum are left out."""
        records = np.frombuffer(self._map, np.uint8, offset=_PROLOGUE.size).reshape(self.pages, RECORD_BYTES)
        states = np.ascontiguousarray(records[:, : _STATE.size]).view("<u4").ravel()
        used = np.flatnonzero((states == SlotState.WRITING) | (states == SlotState.COMMITTED)).tolist()
        del records
        for page in used:
            header = self._read(page)
            if header is not None:
                yield header, SlotState(int(states[page]))

    def close(self) -> None:
        """Unmap the file; it stays."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def _read(self, page: int) -> SlotHeader | None:
        start = _PROLOGUE.size + page * RECORD_BYTES + _STATE.size
        identity = self._map[start : start + _IDENTITY.size]
        (stored,) = _CHECKSUM.unpack_from(self._map, start + _IDENTITY.size)
        if stored != xxhash.xxh3_64_intdigest(identity):
            return None
        header = SlotHeader(page, *_IDENTITY.unpack(identity))
        return header if 0 < header.pages <= self.pages - page else None

    def _read_prologue(self, path: Path) -> int:
        magic, version, record_bytes, pages, segment_id, generation = _PROLOGUE.unpack_from(self._map, 0)
        found = (magic, version, record_bytes, pages, segment_id)
        if found != (MAGIC, VERSION, RECORD_BYTES, self.pages, self._segment_id):
            raise CapacityError(f"{path} is not the header file of this segment; remove it to start empty")
        return int(generation)


def _allocate(descriptor: int, path: Path, size_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise CapacityError(
            f"{path.parent} gave no {format_size(size_bytes)} for slot headers beside the payload: {error}; "
            "choose a smaller --size"
        ) from error
