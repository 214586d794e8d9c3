"""Slot headers: what each slot holds, in a file that only the node maps, so that slots describe themselves.

The file is one 64-byte prologue and one record for each page of the payload; the record of a slot's first page is its
header. All its memory is allocated at the start, since a mapping that finds memory full, be it to read, is the end of
the process. Little-endian:

    prologue  magic 8s | version u32 | record size u32 | pages u64 | segment id 16s | next generation u64 | pad
    record    `RECORD`; the header checksum is xxh3-64 of all before it but the state

The state is written last when a slot is filled and first when it is freed.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpool.core.checksum import block_seeds
from kvpool.core.errors import CapacityError
from kvpool.core.keys import split_hashes
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.core.units import format_size
from kvpool.node.private_file import open_private
from kvpool.ops.failpoints import failpoint

MAGIC = b"KVPOOLHD"
VERSION = 1
_PROLOGUE = struct.Struct("<8sIIQ16sQ16x")
PROLOGUE_BYTES = _PROLOGUE.size
RECORD = np.dtype(
    [
        ("state", "<u4"),
        ("shard", "<u4"),
        ("length", "<u8"),
        ("generation", "<u8"),
        ("namespace", "V32"),
        ("hash", "V32"),
        ("parent", "V32"),
        ("checksum", "<u8"),
        ("header_checksum", "<u8"),
    ]
)
RECORD_BYTES = RECORD.itemsize
_CHECKED = slice(4, RECORD_BYTES - 8)
GENERATIONS_RESERVED = 1 << 20
"""The prologue runs ahead of the generations given out, so that a crash cannot make one be given twice."""

PROLOGUE = -1
"""Stands for the prologue where pages name records."""

ROOT_PARENT = bytes(32)
"""Stands in a header for "no parent"."""

Records = NDArray[np.void]
Pages = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class SlotHeaders:
    """Headers of some slots: the slots' first pages, and a `RECORD` each."""

    pages: Pages
    records: Records

    def __len__(self) -> int:
        return len(self.pages)

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64] | slice) -> "SlotHeaders":
        """Some of them."""
        return SlotHeaders(self.pages[chosen], self.records[chosen])

    def by_namespace(self) -> Iterator["SlotHeaders"]:
        """Those of each namespace, oldest slots first: parents before their children."""
        ids = self.records["namespace"].copy().view("<u8").reshape(-1, 4)
        order = np.lexsort((self.records["generation"], ids[:, 0]))
        ids = ids[order]
        # Ids that begin alike only make more runs than there are namespaces.
        begins = np.flatnonzero((ids[1:] != ids[:-1]).any(axis=1)) + 1
        for run in np.split(order, begins) if len(order) else ():
            yield self.select(run)

    def named(self) -> list[tuple[int, int]]:
        """(page, generation) of each."""
        return list(zip(self.pages.tolist(), self.records["generation"].tolist(), strict=True))


def header_file_bytes(pages: int) -> int:
    """Size of the header file for ``pages`` pages of payload."""
    return _PROLOGUE.size + pages * RECORD_BYTES


def stored_segment_id(path: Path, pages: int) -> bytes | None:
    """The segment id in a header file for ``pages`` pages; None when there is no such file."""
    if not path.exists() or path.stat().st_size != header_file_bytes(pages):
        return None
    with path.open("rb") as file:
        magic, version, record_bytes, stored_pages, segment_id, _ = _PROLOGUE.unpack(file.read(_PROLOGUE.size))
    sound = (magic, version, record_bytes, stored_pages) == (MAGIC, VERSION, RECORD_BYTES, pages)
    return segment_id if sound else None


class HeaderFile:
    """The header file of a segment; owns its mapping until `close`. Not thread-safe: the node holds one lock.

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
        size_bytes = header_file_bytes(pages)
        self._descriptor = open_private(path, "headers")
        try:
            fresh = os.fstat(self._descriptor).st_size == 0
            if not fresh and os.fstat(self._descriptor).st_size != size_bytes:
                raise CapacityError(f"{path} belongs to a segment of another size; remove it to start empty")
            _allocate(self._descriptor, path, size_bytes)
            self._map = self._mapped(size_bytes)
            self.next_generation = 1 if fresh else self._read_prologue(path)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._records: Records = np.frombuffer(self._map, RECORD, offset=_PROLOGUE.size)
        self._reserved = 0
        self.reserve_generations(self.next_generation)

    def reserve_generations(self, next_generation: int) -> None:
        """Make sure that a restart begins above ``next_generation``."""
        if next_generation < self._reserved:
            return
        self._reserved = next_generation + GENERATIONS_RESERVED
        prologue = (MAGIC, VERSION, RECORD_BYTES, self.pages, self._segment_id, self._reserved)
        _PROLOGUE.pack_into(self._map, 0, *prologue)
        self._changed((PROLOGUE,))

    def write(self, headers: SlotHeaders, state: SlotState) -> None:
        """Describe slots; states and checksums are filled in here."""
        records = headers.records.copy()
        records["header_checksum"] = _header_checksums(records)
        records["state"] = 0
        self._records[headers.pages] = records
        failpoint("node.put.before_describe")
        self._records["state"][headers.pages] = state
        self._changed(headers.pages.tolist())

    def commit(self, pages: Pages, checksums: NDArray[np.uint64]) -> SlotHeaders:
        """The slots at ``pages``, described before, are committed with these payload checksums; their headers."""
        headers = self.read(pages)
        headers.records["checksum"] = checksums
        self._records["checksum"][pages] = checksums
        self._records["header_checksum"][pages] = _header_checksums(headers.records)
        failpoint("node.put.mid_header")
        self._records["state"][pages] = SlotState.COMMITTED
        self._changed(pages.tolist())
        return headers

    def read(self, pages: Pages) -> SlotHeaders:
        """What was last written for slots at ``pages``; each of them was."""
        return SlotHeaders(pages, self._records[pages])

    def namespace(self, page: int) -> bytes:
        """The namespace of what was last written for the slot at ``page``."""
        return bytes(self._records["namespace"][page])

    def is_sound(self, page: int) -> bool:
        """Whether the header of the slot at ``page`` is as it was written."""
        record = self._records[[page]]
        return bool(_header_checksums(record)[0] == record["header_checksum"][0])

    def clear(self, pages: int | list[int]) -> None:
        """The slots are free."""
        self._records["state"][pages] = 0
        self._changed([pages] if isinstance(pages, int) else pages)

    def scan(self, state: SlotState) -> SlotHeaders:
        """Every slot in ``state``, in page order."""
        return self.read(np.flatnonzero(self._records["state"] == state).astype(np.uint32))

    def drop_unsound(self) -> int:
        """Clear what an earlier run did not describe soundly, before the first `scan`; how many that were."""
        pages = np.flatnonzero(self._records["state"] != 0).astype(np.uint32)
        headers = self.read(pages)
        lengths = headers.records["length"]
        ends = pages + -(-lengths.astype(np.float64) // PAGE_BYTES)
        sound = (_header_checksums(headers.records) == headers.records["header_checksum"]) & (lengths > 0)
        unsound = pages[~(sound & (ends <= self.pages))]
        self._records["state"][unsound] = 0
        self._changed(unsound.tolist())
        return len(unsound)

    def close(self) -> None:
        """Unmap the file; it stays."""
        del self._records
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._descriptor)

    def _mapped(self, size_bytes: int) -> mmap.mmap:
        """The memory that the file is seen through."""
        return mmap.mmap(self._descriptor, size_bytes)

    def _changed(self, pages: Sequence[int]) -> None:
        """The records of ``pages``, or the `PROLOGUE`, are other ones now; here the file has them already."""

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


def make_records(count: int, **fields: Any) -> Records:  # noqa: ANN401 - scalars and arrays of each field's type
    """``count`` records with these fields, which are scalars, arrays or packed bytes; the others are zero."""
    records = np.zeros(count, RECORD)
    for name, value in fields.items():
        records[name] = np.frombuffer(value, "V32") if isinstance(value, bytes) else value
    return records


def _header_checksums(records: Records) -> NDArray[np.uint64]:
    packed, digest = records.tobytes(), xxhash.xxh3_64_intdigest
    starts = range(0, len(packed), RECORD_BYTES)
    return np.array([digest(packed[i + _CHECKED.start : i + _CHECKED.stop]) for i in starts], np.uint64)


def checksum_seeds(records: Records) -> list[int]:
    """Checksum seeds of the blocks that the records describe."""
    return [
        block_seeds(int.from_bytes(namespace[:8], "little"), block_hash, shard, [generation], length)[0]
        for namespace, block_hash, shard, generation, length in zip(
            split_hashes(records["namespace"].tobytes()),
            split_hashes(records["hash"].tobytes()),
            records["shard"].tolist(),
            records["generation"].tolist(),
            records["length"].tolist(),
            strict=True,
        )
    ]
