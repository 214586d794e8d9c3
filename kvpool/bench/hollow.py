"""A store node without bytes, in a process of its own: real headers, slots, control stream; no payload to allocate.

A million blocks of 4 KiB would need 4 GiB of memory to measure what happens to their entries.
"""

import sys
import time
from pathlib import Path

import numpy as np

from kvpool.bench.measure import say
from kvpool.core.errors import UnavailableError
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES, SEGMENT_ID_BYTES
from kvpool.core.namespace import Namespace
from kvpool.core.slots import SlotState
from kvpool.node.control import Control
from kvpool.node.copier import Copier, copy_schemes
from kvpool.node.headers import ROOT_PARENT, HeaderFile, SlotHeaders, make_records
from kvpool.node.link import MetaLink
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.server import restore_slots
from kvpool.node.store import NodeStore
from kvpool.v1 import common_pb2

NODE_ID = "hollow"
NAMESPACE = Namespace(model="kvpool-bench-recovery", block_tokens=16, block_bytes=PAGE_BYTES)
CHAIN_BLOCKS = 256
_STEP_CHAINS = 64


class HollowSegment:
    """A segment of which only the size is real."""

    medium = "none"

    def __init__(self, segment_id: bytes, size_bytes: int) -> None:
        self.segment_id = segment_id
        self.size_bytes = size_bytes
        self.payload = np.empty(0, np.uint8)

    def descriptors(self) -> tuple[int, int]:
        """Nothing can be mapped."""
        raise UnavailableError("a hollow segment has no bytes")

    def view(self, page: int, length: int) -> memoryview:
        """Nothing is there."""
        raise OSError(f"page {page}: no such memory, for {length} bytes")

    def close(self) -> None:
        """Nothing is held."""


def chain(number: int) -> bytes:
    """The hashes of chain ``number``, packed: the same in every process."""
    return np.random.default_rng(number).bytes(CHAIN_BLOCKS * HASH_BYTES)


def write_headers(folder: Path, blocks: int) -> None:
    """The files of a node that holds ``blocks`` blocks, in chains."""
    headers = HeaderFile(folder / "headers", bytes(SEGMENT_ID_BYTES), blocks)
    chains = blocks // CHAIN_BLOCKS
    for first in range(0, chains, _STEP_CHAINS):
        numbers = range(first, min(first + _STEP_CHAINS, chains))
        hashes = b"".join(chain(number) for number in numbers)
        above = b"".join(ROOT_PARENT + chain(number)[:-HASH_BYTES] for number in numbers)
        count = len(numbers) * CHAIN_BLOCKS
        pages = np.arange(numbers[0] * CHAIN_BLOCKS, numbers[0] * CHAIN_BLOCKS + count, dtype=np.uint32)
        records = make_records(
            count,
            length=PAGE_BYTES,
            generation=pages + 1,
            namespace=NAMESPACE.id * count,
            hash=hashes,
            parent=above,
        )
        headers.write(SlotHeaders(pages, records), SlotState.COMMITTED)
    headers.close()
    (folder / "namespaces").write_bytes(b"\n" + NAMESPACE.document)


def serve(uri: str, folder: str, blocks: int, incarnation: int) -> None:
    """In a child: what a node's start does without its memory; says how long it took, then serves until stdin ends."""
    began_s = time.perf_counter()
    path = Path(folder)
    headers = HeaderFile(path / "headers", bytes(SEGMENT_ID_BYTES), blocks)
    slots = restore_slots(headers, blocks)
    link = MetaLink(uri.removeprefix("grpc://"), NODE_ID)
    book = NamespaceBook(path / "namespaces", link.describe)
    segment = HollowSegment(bytes(SEGMENT_ID_BYTES), blocks * PAGE_BYTES)
    store = NodeStore(segment, headers, slots, book, link, incarnation)
    restored_s = time.perf_counter() - began_s
    copier = Copier(store, link, NODE_ID, copy_schemes(ucx=False))
    control = Control(NODE_ID, incarnation, [], store, link, common_pb2.Scrub, copier, lambda: None)
    control.start()
    control.ready.wait()
    say(restored_s)
    sys.stdin.read()
    control.stop()
    copier.stop()
    link.close()
